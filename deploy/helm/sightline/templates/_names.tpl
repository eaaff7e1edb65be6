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
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sightline.labels" -}}
{{ include "sightline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "sightline.image" -}}
{{- $tag := .image.tag | default .default -}}
{{- if .image.digest }}{{ .image.repository }}@{{ .image.digest }}{{ else }}{{ .image.repository }}:{{ $tag }}{{ end -}}
{{- end -}}

{{- define "sightline.replicasPerPod" -}}
{{- max 1 (int .Values.replicas.gpusPerPod) -}}
{{- end -}}

{{/* Every container of the chart. */}}
{{- define "sightline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "sightline.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}
