{{/* Values that contradict each other or open a door: refused, each with what would be right. */}}
{{- define "sightline.refuse" -}}
{{- $open := "everybody may see and change every camera" -}}
{{- $plain := "tokens and pictures may be read on the way" -}}
{{- $inside := "who reaches the pods may see and forge frames and answers" -}}
{{- $gateway := .Values.gateway -}}
{{- if and (not $gateway.tokens.secretName) (ne $gateway.allowUnauthenticated $open) -}}
{{- fail (printf "the gateway would ask nobody for a token: name gateway.tokens.secretName (sightline tokens create, then kubectl create secret generic NAME --from-file=%s), or set gateway.allowUnauthenticated to %q" $gateway.tokens.key $open) -}}
{{- end -}}
{{- if and $gateway.tokens.secretName $gateway.allowUnauthenticated -}}
{{- fail "gateway.tokens.secretName and gateway.allowUnauthenticated contradict each other: leave one out" -}}
{{- end -}}
{{- if and (ne $gateway.service.type "ClusterIP") (not $gateway.tls.secretName) (ne $gateway.allowPlaintext $plain) -}}
{{- fail (printf "gateway.service.type %s would open the gateway beyond the cluster without TLS: name gateway.tls.secretName, or set gateway.allowPlaintext to %q" $gateway.service.type $plain) -}}
{{- end -}}
{{- if and $gateway.tls.clientCertificates (not $gateway.tls.secretName) -}}
{{- fail "gateway.tls.clientCertificates needs gateway.tls.secretName, whose ca.crt signs them" -}}
{{- end -}}
{{- if and (not .Values.internalTls.secretName) (ne .Values.internalTls.allowPlain $inside) -}}
{{- fail (printf "Sightline's processes would talk to each other without TLS: name internalTls.secretName (tls.crt, tls.key, ca.crt), or set internalTls.allowPlain to %q" $inside) -}}
{{- end -}}
{{- if eq (int $gateway.grpcPort) (int $gateway.httpPort) -}}
{{- fail (printf "gateway.grpcPort and gateway.httpPort are both %d: give them different ports" (int $gateway.grpcPort)) -}}
{{- end -}}
{{- range $name := list "kvRedis" "gcsRedis" -}}
{{- $redis := index $.Values $name -}}
{{- if and $redis.enabled (not $redis.secretName) -}}
{{- fail (printf "%s.enabled needs %s.secretName: a Secret with its password in key %s" $name $name $redis.passwordKey) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.kvRedis.enabled (dig "tiers" "redis_url" "" .Values.config) -}}
{{- fail "kvRedis.enabled runs a Redis and config.tiers.redis_url names another: leave one out" -}}
{{- end -}}
{{- if and (or .Values.kvRedis.enabled (dig "tiers" "redis_url" "" .Values.config)) (not .Values.memoryKey.secretName) -}}
{{- fail (printf "whoever can write to Redis could forge what cameras remember: name memoryKey.secretName (kubectl create secret generic NAME --from-literal=%s=$(openssl rand -hex 32))" .Values.memoryKey.key) -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled $gateway.tokens.secretName (not .Values.monitoring.podMonitor.tokenSecretName) -}}
{{- fail "monitoring.podMonitor.enabled needs monitoring.podMonitor.tokenSecretName: a Secret with a token of role view in key token" -}}
{{- end -}}
{{- end -}}
