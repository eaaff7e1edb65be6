{{/*
A Helm hook that runs cluster.kubernetes.hooks as a Job. Its Role exists only while the hook runs:
(dict "root" $ "name" NAME "when" "post-upgrade" "rules" (list ...)).
*/}}
{{- define "sightline.hook" -}}
{{- $root := .root -}}{{- $job := . -}}
{{- $name := printf "%s-%s" (include "sightline.fullname" $root) .name -}}
{{- $hook := dict "helm.sh/hook" .when "helm.sh/hook-delete-policy" "before-hook-creation,hook-succeeded" }}
{{- range $kind, $group := dict "ServiceAccount" "v1" "Role" "rbac.authorization.k8s.io/v1" "RoleBinding" "rbac.authorization.k8s.io/v1" "Job" "batch/v1" }}
---
apiVersion: {{ $group }}
kind: {{ $kind }}
metadata:
  name: {{ $name }}
  labels:
    {{- include "sightline.labels" $root | nindent 4 }}
  annotations:
    {{- toYaml $hook | nindent 4 }}
    helm.sh/hook-weight: {{ ternary "1" "0" (eq $kind "Job") | quote }}
{{- if eq $kind "ServiceAccount" }}
automountServiceAccountToken: false
{{- else if eq $kind "Role" }}
rules:
  {{- toYaml $job.rules | nindent 2 }}
{{- else if eq $kind "RoleBinding" }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $name }}, namespace: {{ $root.Release.Namespace | quote }}}
{{- else }}
spec:
  backoffLimit: 3
  {{- /* Leaves time to pull a new image, which this pod is the first to use. Helm itself waits for --timeout. */}}
  activeDeadlineSeconds: 3600
  template:
    metadata:
      labels:
        {{- include "sightline.selector" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $job.name }}
    spec:
      restartPolicy: Never
      serviceAccountName: {{ $name }}
      automountServiceAccountToken: true
      enableServiceLinks: false
      securityContext:
        {{- include "sightline.podSecurity" (dict "root" $root "user" 10001) | nindent 8 }}
      {{- include "sightline.pullSecrets" $root | nindent 6 }}
      {{- /* If all nodes are tainted, a pod without tolerations stays pending until its deadline and blocks Helm. */}}
      {{- include "sightline.nodes" $root.Values.control | nindent 6 }}
      containers:
        - name: {{ $job.name }}
          image: {{ include "sightline.image" (dict "image" $root.Values.image "default" $root.Chart.AppVersion) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          securityContext:
            {{- include "sightline.containerSecurity" $root | nindent 12 }}
          command: [python, -m, cluster.kubernetes.hooks]
          args: [{{ $job.name }}, {{ include "sightline.fullname" $root | quote }}]
          env: [{name: HOME, value: /tmp}]
          resources:
            requests: {cpu: 100m, memory: 256Mi}
            limits: {cpu: "1", memory: 512Mi}
{{- end }}
{{- end }}
{{- end -}}
