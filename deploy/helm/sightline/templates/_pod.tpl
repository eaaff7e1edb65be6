{{/*
A pod of the Ray cluster: (dict "root" $ "component" "head|control|gateway|decoder|replica" "settings" .Values.X).
It has one container, in which Ray starts the processes. The readiness probe checks the gateway or the replicas if the
pod has them, otherwise the Ray node.
*/}}
{{- define "sightline.pod" -}}
{{- $root := .root -}}{{- $values := .root.Values -}}
{{- $secrets := include "sightline.secrets" .root | fromYaml -}}
{{- $control := eq .component "control" -}}
{{- $gateway := or $control (eq .component "gateway") -}}
{{- $replica := eq .component "replica" -}}
{{- $redisTls := and (include "sightline.ownGcsRedis" $root) $secrets.internalTls (eq .component "head") -}}
{{- $node := dict "path" "/api/healthz" "port" 52365 -}}
metadata:
  # No version labels: a changed label would replace the pods.
  labels:
    {{- include "sightline.selector" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
    {{- if $gateway }}
    sightline.io/gateway: "true"
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- $autoscaling := and (eq .component "head") (include "sightline.autoscaling" $root) }}
  serviceAccountName: {{ include "sightline.fullname" $root }}-{{ ternary "control" (ternary "head" "worker" (not (empty $autoscaling))) $control }}
  automountServiceAccountToken: {{ and $control $values.cameras.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: 60
  securityContext:
    {{- include "sightline.podSecurity" (dict "root" $root "user" 10001) | nindent 4 }}
  {{- include "sightline.pullSecrets" $root | nindent 2 }}
  {{- include "sightline.nodes" .settings | nindent 2 }}
  {{- with .settings.scheduling }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if and $replica .settings.runtimeClassName }}
  runtimeClassName: {{ .settings.runtimeClassName | quote }}
  {{- end }}
  containers:
    - name: ray-{{ ternary "head" "worker" (eq .component "head") }}
      image: {{ include "sightline.image" (dict "image" $values.image "default" $root.Chart.AppVersion) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext:
        {{- include "sightline.containerSecurity" $root | nindent 8 }}
      env:
        {{- $all := include "sightline.environment" (dict "root" $root "head" $redisTls "cache" (and $replica (include "sightline.modelCache" $root))) | fromYamlArray }}
        {{- /* The API server rejects duplicate names: keep the last, so that `env` overrides the defaults. */}}
        {{- $names := list }}{{ $kept := list }}
        {{- range reverse $all }}
        {{- if not (has .name $names) }}
        {{- $names = append $names .name }}{{ $kept = prepend $kept . }}
        {{- end }}
        {{- end }}
        {{- toYaml $kept | nindent 8 }}
      ports:
        {{- if eq .component "head" }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        # KubeRay creates no Service without this port; nothing listens on it.
        - {name: serve, containerPort: 8000}
        {{- else if $gateway }}
        # Fixed, whatever ports the Service has: its targetPort refers to these names.
        - {name: grpc, containerPort: 50051}
        - {name: http, containerPort: 9464}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        {{- range $number := until (include "sightline.pages" (dict "root" $root "component" .component) | int) }}
        - {name: process-{{ $number }}, containerPort: {{ add 9500 $number }}}
        {{- end }}
      readinessProbe:
        {{- if and $gateway $values.gateway.tls.clientCertificates }}
        # The kubelet has no client certificate.
        tcpSocket: {port: http}
        {{- else if $gateway }}
        httpGet: {path: /healthz, port: http, scheme: {{ ternary "HTTPS" "HTTP" (hasKey $secrets "tls") }}}
        {{- else if $replica }}
        # Ready once its replicas have loaded their models (actors/startup.py), so that a node drain waits for them.
        exec: {command: [sh, -c, 'test "$(grep -c @sightline-replica- /proc/net/unix)" -ge {{ include "sightline.replicasPerPod" $root }}']}
        {{- else }}
        httpGet: {{- toYaml $node | nindent 10 }}
        {{- end }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 6
      livenessProbe:
        httpGet: {{- toYaml $node | nindent 10 }}
        initialDelaySeconds: 60
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 12
      resources:
        {{- $resources := deepCopy .settings.resources }}
        {{- if and $replica (gt (int .settings.gpusPerPod) 0) }}
        {{- $_ := set $resources.limits .settings.gpuResource (int .settings.gpusPerPod) }}
        {{- $_ := set $resources.requests .settings.gpuResource (int .settings.gpusPerPod) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shared-mem, mountPath: /dev/shm}
        {{- if $gateway }}
        - {name: data, mountPath: /var/lib/sightline}
        {{- if $secrets.tokens }}
        - {name: tokens, mountPath: /etc/sightline/tokens, readOnly: true}
        {{- end }}
        {{- if $secrets.tls }}
        - {name: tls, mountPath: /etc/sightline/tls, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if or $redisTls (and $secrets.internalTls (ne .component "head")) }}
        - {name: internal-tls, mountPath: /etc/sightline/internal-tls, readOnly: true}
        {{- end }}
        {{- if and $secrets.memoryKey (or $control $replica) }}
        - {name: memory-key, mountPath: /etc/sightline/memory-key, readOnly: true}
        {{- end }}
        {{- if and $values.models.existingClaim (or $control $replica) }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if and $replica (include "sightline.modelCache" $root) }}
        - {name: model-cache, mountPath: /var/cache/sightline}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- if $autoscaling }}
    - name: autoscaler-token
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token}
          - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
          - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
    {{- end }}
    - {name: tmp, emptyDir: {sizeLimit: 20Gi}}
    - {name: shared-mem, emptyDir: {medium: Memory, sizeLimit: {{ ternary .settings.sharedMemory "512Mi" $replica }}}}
    {{- if $gateway }}
    {{- if and $control $values.control.persistence.enabled }}
    {{- $claim := $values.control.persistence.existingClaim | default (printf "%s-data" (include "sightline.fullname" $root)) }}
    - {name: data, persistentVolumeClaim: {claimName: {{ $claim | quote }}}}
    {{- else }}
    # A gateway pod writes its own audit log here, for a log collector.
    - {name: data, emptyDir: {sizeLimit: {{ $values.control.persistence.size }}}}
    {{- end }}
    {{- with $secrets.tokens }}
    - name: tokens
      secret: {secretName: {{ .name | quote }}, defaultMode: 0440, items: [{key: {{ $values.gateway.tokens.key | quote }}, path: {{ $values.gateway.tokens.key | quote }}}]}
    {{- end }}
    {{- with $secrets.tls }}
    - {name: tls, secret: {secretName: {{ .name | quote }}, defaultMode: 0440}}
    {{- end }}
    {{- end }}
    {{- if or $redisTls (and $secrets.internalTls (ne .component "head")) }}
    - {name: internal-tls, secret: {secretName: {{ $secrets.internalTls.name | quote }}, defaultMode: 0440}}
    {{- end }}
    {{- if and $secrets.memoryKey (or $control $replica) }}
    - {name: memory-key, secret: {secretName: {{ $secrets.memoryKey.name | quote }}, defaultMode: 0440}}
    {{- end }}
    {{- if and $values.models.existingClaim (or $control $replica) }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $values.models.existingClaim | quote }}, readOnly: true}}
    {{- end }}
    {{- if and $replica (include "sightline.modelCache" $root) }}
    {{- if $values.models.cache.enabled }}
    - {name: model-cache, persistentVolumeClaim: {claimName: {{ include "sightline.modelCacheClaim" $root }}}}
    {{- else }}
    - {name: model-cache, emptyDir: {sizeLimit: {{ $values.models.cache.size }}}}
    {{- end }}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Not empty: replicas download the model by its hub id. */}}
{{- define "sightline.modelCache" -}}
{{- $model := dig "model" "name" "" .Values.config -}}
{{- if and (contains "/" $model) (not (hasPrefix "/" $model)) -}}yes{{- end -}}
{{- end -}}

{{/* One name per access mode: a claim's access mode is immutable. */}}
{{- define "sightline.modelCacheClaim" -}}
{{ include "sightline.fullname" . }}-model-cache-{{ lower .Values.models.cache.accessMode }}
{{- end -}}

{{/* Environment of all Sightline processes. The RAY_ flags match actors/session.py. */}}
{{- define "sightline.environment" -}}
{{- $root := .root -}}{{- $values := .root.Values -}}
- {name: HF_HOME, value: {{ ternary "/var/cache/sightline" "/tmp" (not (empty .cache)) }}/huggingface}
- {name: HOME, value: /tmp}
# Processes log to the container's output, which the cluster's log collector reads.
- {name: RAY_LOG_TO_STDERR, value: "1"}
- {name: RAY_SERVE_ENABLE_DIRECT_INGRESS, value: "0"}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "0"}
- {name: RAY_SERVE_USE_GRPC_BY_DEFAULT, value: "0"}
- {name: RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD, value: "1"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_ROTATION_MAX_BYTES, value: "10485760"}
- {name: RAY_ROTATION_BACKUP_COUNT, value: "1"}
- {name: RAY_task_events_report_interval_ms, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: OMP_NUM_THREADS, value: "1"}
- {name: OPENBLAS_NUM_THREADS, value: "1"}
- {name: MKL_NUM_THREADS, value: "1"}
- {name: OMP_WAIT_POLICY, value: PASSIVE}
{{- if $values.kvRedis.enabled }}
- name: KV_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ (include "sightline.secrets" $root | fromYaml).kvRedis.name | quote }}, key: {{ $values.kvRedis.passwordKey | quote }}}}
{{- end }}
{{- range $name, $value := $values.env }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- range $values.secretEnv }}
- name: {{ .name | quote }}
  valueFrom: {secretKeyRef: {name: {{ .secretName | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- if .head }}
# For Ray, and for KubeRay's Redis cleanup job, which copies them from the head.
- {name: RAY_REDIS_CA_CERT, value: /etc/sightline/internal-tls/ca.crt}
- {name: RAY_REDIS_CLIENT_CERT, value: /etc/sightline/internal-tls/tls.crt}
- {name: RAY_REDIS_CLIENT_KEY, value: /etc/sightline/internal-tls/tls.key}
- {name: RAY_REDIS_SERVER_NAME, value: {{ $values.internalTls.name | quote }}}
{{- end }}
{{- end -}}
