{{/* Rejects contradictory values and says what to change. The schema requires a sentence for each insecure option. */}}
{{- define "sightline.refuse" -}}
{{- $gateway := .Values.gateway -}}
{{- $name := include "sightline.fullname" . -}}
{{- /* A release name may start with a digit and contain dots; Services and KubeRay's clusters may not. */ -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%s is not a valid Service name: set fullnameOverride to lower-case letters, digits and -, starting with a letter" $name) -}}
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
{{- fail "config.security.oidc and gateway.allowUnauthenticated contradict each other: leave one out" -}}
{{- end -}}
{{- if and $gateway.tls.clientCertificates (not $gateway.tls.secretName) -}}
{{- fail "gateway.tls.clientCertificates needs gateway.tls.secretName: a Secret whose ca.crt signs client certificates" -}}
{{- end -}}
{{- if eq (int $gateway.grpcPort) (int $gateway.httpPort) -}}
{{- fail (printf "gateway.grpcPort and gateway.httpPort are both %d: give them different ports" (int $gateway.grpcPort)) -}}
{{- end -}}
{{- /* A generated certificate is not replaced, and the CA key needed to sign one for another name is not kept. */ -}}
{{- if and (ne .Values.internalTls.name "sightline") (not .Values.internalTls.secretName) -}}
{{- fail "internalTls.name needs internalTls.secretName: the chart's own certificate is for \"sightline\"" -}}
{{- end -}}
{{- if and .Values.kvRedis.enabled (dig "tiers" "redis_url" "" .Values.config) -}}
{{- fail "kvRedis.enabled and config.tiers.redis_url contradict each other: use the chart's Redis or your own" -}}
{{- end -}}
{{- if and .Values.gcsRedis.address (not .Values.gcsRedis.secretName) -}}
{{- fail "gcsRedis.address needs gcsRedis.secretName: a Secret with the password of that Redis" -}}
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
{{- fail (printf "config.%s is %s, which is not writable: use a path below /var/lib/sightline or a mount path of extraVolumeMounts" $key $path) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.operator) -}}
{{- fail "networkPolicy.operator is empty: a rule without peers would let anyone reach Ray's dashboard, which runs submitted code" -}}
{{- end -}}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.host) -}}
{{- fail "gateway.ingress.enabled needs gateway.ingress.host" -}}
{{- end -}}
{{- if and $gateway.httpRoute.enabled (not $gateway.httpRoute.parentRefs) -}}
{{- fail "gateway.httpRoute.enabled needs gateway.httpRoute.parentRefs: the Gateways to attach to" -}}
{{- end -}}
{{- if and (contains "/mig-" .Values.replicas.gpuResource) (gt (int .Values.replicas.gpusPerPod) 1) -}}
{{- fail "replicas.gpusPerPod must be 1 with MIG slices, because CUDA sees only one per pod: raise replicas.pods instead" -}}
{{- end -}}
{{- $gpus := include "sightline.gpusPerReplica" . | int -}}
{{- if mod (int .Values.replicas.gpusPerPod) $gpus -}}
{{- fail (printf "replicas.gpusPerPod is %d, but config.vllm.arguments give each replica %d GPUs: set it to a multiple" (int .Values.replicas.gpusPerPod) $gpus) -}}
{{- end -}}
{{- range $component := list "decoder" "replica" -}}
{{- if gt (include "sightline.pages" (dict "root" $ "component" $component) | int) 16 -}}
{{- fail (printf "monitoring.podMonitor.pods supports at most 16 processes per pod, and a %s pod runs more" $component) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.decoders.maxPods (lt (int .Values.decoders.maxPods) (int .Values.decoders.pods)) -}}
{{- fail (printf "decoders.maxPods is %d, below decoders.pods: set it to %d or more, or to 0 to disable autoscaling" (int .Values.decoders.maxPods) (int .Values.decoders.pods)) -}}
{{- end -}}
{{- if and .Values.models.cache.enabled (include "sightline.modelCache" .) (gt (int .Values.replicas.pods) 1) (ne .Values.models.cache.accessMode "ReadWriteMany") -}}
{{- fail "several replica pods share models.cache, so models.cache.accessMode must be ReadWriteMany; alternatively put the checkpoint on models.existingClaim or set models.cache.enabled=false" -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled $gateway.tokens.secretName (not .Values.monitoring.podMonitor.tokenSecretName) -}}
{{- fail "monitoring.podMonitor.enabled needs monitoring.podMonitor.tokenSecretName: a Secret with a token of role view under the key token" -}}
{{- end -}}
{{- end -}}
