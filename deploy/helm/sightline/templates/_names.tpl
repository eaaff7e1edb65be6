{{/* Names, labels, images: what every object shares. */}}
{{- define "sightline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sightline.selector" -}}
app.kubernetes.io/name: sightline
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "sightline.labels" -}}
{{ include "sightline.selector" . }}
{{- /* A label holds no + of a build. */}}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "sightline.image" -}}
{{- $tag := .image.tag | default .default -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}{{ else }}{{ .image.repository }}:{{ $tag }}{{ end -}}
{{- end -}}

{{/* Every pod of the chart. */}}
{{- define "sightline.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Nodes of a kind of pod, by its values. */}}
{{- define "sightline.nodes" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Part -> name of its Secret, and whether the chart makes it (secrets.yaml) or cert-manager (certificates.yaml), of the parts
in use. */}}
{{- define "sightline.secrets" -}}
{{- $values := .Values -}}{{- $gateway := .Values.gateway -}}
{{- $redis := or $values.kvRedis.enabled (ne (dig "tiers" "redis_url" "" $values.config) "") -}}
{{- $used := dict
      "tokens" (list (not $gateway.allowUnauthenticated) $gateway.tokens.secretName)
      "tls" (list (not $gateway.allowPlaintext) $gateway.tls.secretName)
      "internalTls" (list (not $values.internalTls.allowPlain) $values.internalTls.secretName)
      "memoryKey" (list $redis $values.memoryKey.secretName)
      "kvRedis" (list $values.kvRedis.enabled $values.kvRedis.secretName)
      "gcsRedis" (list $values.gcsRedis.enabled $values.gcsRedis.secretName) -}}
{{- range $part, $each := $used -}}
{{- $own := index $each 1 -}}
{{- if or (index $each 0) $own }}
{{ $part }}:
  name: {{ $own | default (printf "%s-%s" (include "sightline.fullname" $) (kebabcase $part)) | quote }}
  {{- $issued := and $values.certManager.enabled (hasSuffix "ls" $part) }}
  made: {{ not (or $own $issued) }}
  issued: {{ and $issued (not $own) }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Host names of the gateway's certificate. */}}
{{- define "sightline.hosts" -}}
{{- $service := printf "%s-gateway" (include "sightline.fullname" .) -}}
{{- $inNamespace := printf "%s.%s" $service .Release.Namespace -}}
{{- toYaml (list $service $inNamespace (printf "%s.svc" $inNamespace) (printf "%s.svc.cluster.local" $inNamespace) "localhost") -}}
{{- end -}}

{{/* Whether the chart runs the Redis of Ray's tables. */}}
{{- define "sightline.ownGcsRedis" -}}
{{- if and .Values.gcsRedis.enabled (not .Values.gcsRedis.address) -}}yes{{- end -}}
{{- end -}}

{{- define "sightline.replicasPerPod" -}}
{{- max 1 (int .Values.replicas.gpusPerPod) -}}
{{- end -}}

{{/* Not empty: Ray's autoscaler runs, for pods of decoders. */}}
{{- define "sightline.autoscaling" -}}
{{- if gt (int .Values.decoders.maxPods) (int .Values.decoders.pods) -}}yes{{- end -}}
{{- end -}}

{{/* Pages of metrics in a pod (dict "root" $ "component" "head|control|gateway|decoder|replica"), where they are scraped there. */}}
{{- define "sightline.pages" -}}
{{- $values := .root.Values -}}
{{- $control := add 1 (ternary 1 0 $values.cameras.enabled) (ternary 1 0 (dig "alerts" "enabled" true $values.config)) -}}
{{- $pages := dict "head" 0 "control" $control "gateway" 0 "decoder" (int $values.decoders.perPod) "replica" (add 1 (include "sightline.replicasPerPod" .root | int)) -}}
{{- ternary (get $pages .component) 0 (and $values.monitoring.podMonitor.enabled $values.monitoring.podMonitor.pods) -}}
{{- end -}}

{{/* Every container of the chart. */}}
{{- define "sightline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* (dict "root" $ "user" 10001). OpenShift gives each namespace users of its own, and refuses any other. */}}
{{- define "sightline.podSecurity" -}}
runAsNonRoot: true
{{- if not (.root.Capabilities.APIVersions.Has "security.openshift.io/v1") }}
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}
