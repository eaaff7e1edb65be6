{{/* Values that contradict each other: refused, each with what would be right. What opens a door takes a whole sentence, by
the schema. */}}
{{- define "sightline.refuse" -}}
{{- $gateway := .Values.gateway -}}
{{- $name := include "sightline.fullname" . -}}
{{- /* Helm lets a release begin with a digit and have dots; Kubernetes neither a Service nor KubeRay its clusters. */ -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "no Service may be called %s: name it in fullnameOverride, by letters, digits and -, a letter first" $name) -}}
{{- end -}}
{{- if and $gateway.tokens.secretName $gateway.allowUnauthenticated -}}
{{- fail "gateway.tokens.secretName and gateway.allowUnauthenticated contradict each other: leave one out" -}}
{{- end -}}
{{- if and $gateway.tls.secretName $gateway.allowPlaintext -}}
{{- fail "gateway.tls.secretName and gateway.allowPlaintext contradict each other: leave one out" -}}
{{- end -}}
{{- if and .Values.internalTls.secretName .Values.internalTls.allowPlain -}}
{{- fail "internalTls.secretName and internalTls.allowPlain contradict each other: leave one out" -}}
{{- end -}}
{{- if and $gateway.allowUnauthenticated (dig "security" "oidc" "" .Values.config) -}}
{{- fail "config.security.oidc asks who people are, and gateway.allowUnauthenticated nobody: leave one out" -}}
{{- end -}}
{{- if and $gateway.tls.clientCertificates (not $gateway.tls.secretName) -}}
{{- fail "gateway.tls.clientCertificates needs gateway.tls.secretName, whose ca.crt signs them" -}}
{{- end -}}
{{- if eq (int $gateway.grpcPort) (int $gateway.httpPort) -}}
{{- fail (printf "gateway.grpcPort and gateway.httpPort are both %d: give them different ports" (int $gateway.grpcPort)) -}}
{{- end -}}
{{- /* A made one is not made again, and the authority's key that another would need is not kept. */ -}}
{{- if and (ne .Values.internalTls.name "sightline") (not .Values.internalTls.secretName) -}}
{{- fail "internalTls.name is that of a certificate of your own and needs internalTls.secretName; what the chart makes is for \"sightline\"" -}}
{{- end -}}
{{- if and .Values.kvRedis.enabled (dig "tiers" "redis_url" "" .Values.config) -}}
{{- fail "kvRedis.enabled runs a Redis and config.tiers.redis_url names another: leave one out" -}}
{{- end -}}
{{- if and .Values.gcsRedis.address (not .Values.gcsRedis.secretName) -}}
{{- fail "gcsRedis.address needs gcsRedis.secretName: a Secret with its password" -}}
{{- end -}}
{{- $writable := list "/tmp" "/var/lib/sightline" -}}
{{- range .Values.extraVolumeMounts -}}
{{- $writable = append $writable .mountPath -}}
{{- end -}}
{{- range $key, $path := dict "security.audit_log" (dig "security" "audit_log" "" .Values.config | default "") "clips.folder" (dig "clips" "folder" "" .Values.config | default "") -}}
{{- $found := not $path -}}
{{- range $writable -}}
{{- $found = or $found (hasPrefix (printf "%s/" (trimSuffix "/" .)) (printf "%s/" $path)) -}}
{{- end -}}
{{- if not $found -}}
{{- fail (printf "config.%s is %s, where nothing can be written: name a path below /var/lib/sightline or one of extraVolumeMounts" $key $path) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.operator) -}}
{{- fail "networkPolicy.operator is empty: without peers its rule would let everybody reach Ray's dashboard, which runs what it is given" -}}
{{- end -}}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.host) -}}
{{- fail "gateway.ingress.enabled needs gateway.ingress.host" -}}
{{- end -}}
{{- if and $gateway.httpRoute.enabled (not $gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.enabled needs gateway.httpRoute.parentRefs: the Gateways that it belongs to" -}}
{{- end -}}
{{- if and (contains "/mig-" .Values.replicas.gpuResource) (gt (int .Values.replicas.gpusPerPod) 1) -}}
{{- fail "replicas.gpusPerPod must be 1 with slices of a card (MIG), of which CUDA finds one in a pod: raise replicas.pods instead" -}}
{{- end -}}
{{- range $component := list "decoder" "replica" -}}
{{- if gt (include "sightline.pages" (dict "root" $ "component" $component) | int) 16 -}}
{{- fail (printf "monitoring.podMonitor.pods has ports for 16 processes of a pod, and a pod of %ss runs more" $component) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.decoders.maxPods (lt (int .Values.decoders.maxPods) (int .Values.decoders.pods)) -}}
{{- fail (printf "decoders.maxPods is %d, below decoders.pods: give it %d or more, or 0 for a fixed number" (int .Values.decoders.maxPods) (int .Values.decoders.pods)) -}}
{{- end -}}
{{- if and .Values.models.cache.enabled (include "sightline.modelCache" .) (gt (int .Values.replicas.pods) 1) (ne .Values.models.cache.accessMode "ReadWriteMany") -}}
{{- fail "several replica pods share models.cache, so models.cache.accessMode must be ReadWriteMany; or put the checkpoint on models.existingClaim, or set models.cache.enabled=false" -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled $gateway.tokens.secretName (not .Values.monitoring.podMonitor.tokenSecretName) -}}
{{- fail "monitoring.podMonitor.enabled needs monitoring.podMonitor.tokenSecretName: a Secret with a token of role view in key token" -}}
{{- end -}}
{{- end -}}
