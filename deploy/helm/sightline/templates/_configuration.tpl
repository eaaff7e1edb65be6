{{/* Configuration of both Serve applications: the user's, overridden by the keys that the chart sets. */}}
{{- define "sightline.configuration" -}}
{{- $security := dict "internal_tls" dict -}}
{{- $secrets := include "sightline.secrets" . | fromYaml -}}
{{- if $secrets.tokens -}}
{{- $_ := set $security "tokens_file" (printf "/etc/sightline/tokens/%s" .Values.gateway.tokens.key) -}}
{{- else -}}
{{- $_ := set $security "allow_unauthenticated" true -}}
{{- end -}}
{{- if $secrets.tls -}}
{{- $tls := dict "certificate" "/etc/sightline/tls/tls.crt" "key" "/etc/sightline/tls/tls.key" -}}
{{- if .Values.gateway.tls.clientCertificates -}}
{{- $_ := set $tls "client_ca" "/etc/sightline/tls/ca.crt" -}}
{{- end -}}
{{- $_ := set $security "tls" $tls -}}
{{- end -}}
{{- if $secrets.internalTls -}}
{{- $inside := "/etc/sightline/internal-tls" -}}
{{- $_ := set $security "internal_tls" (dict "certificate" (printf "%s/tls.crt" $inside) "key" (printf "%s/tls.key" $inside) "ca" (printf "%s/ca.crt" $inside) "name" .Values.internalTls.name) -}}
{{- else -}}
{{- $_ := unset $security "internal_tls" -}}
{{- $_ := set $security "allow_plain_inside" true -}}
{{- end -}}
{{- if $secrets.memoryKey -}}
{{- $_ := set $security "memory_key_file" (printf "/etc/sightline/memory-key/%s" .Values.memoryKey.key) -}}
{{- end -}}
{{- $cluster := dict
      "gateways" (add 1 .Values.gateways.pods)
      "decoders" (mul .Values.decoders.pods .Values.decoders.perPod)
      "replicas" (mul .Values.replicas.pods (include "sightline.replicasPerPod" . | int))
      "state_dir" "/var/lib/sightline"
      "placement" (dict "control" "sightline_control" "decoder" "sightline_decoder" "replica" "sightline_replica") -}}
{{- if gt (int .Values.gateways.pods) 0 -}}
{{- $_ := set $cluster.placement "gateway" "sightline_gateway" -}}
{{- end -}}
{{- if include "sightline.autoscaling" . -}}
{{- $_ := set $cluster "max_decoders" (mul .Values.decoders.maxPods .Values.decoders.perPod) -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.podMonitor.pods -}}
{{- $_ := set $cluster "metrics_port" 9500 -}}
{{- end -}}
{{- $own := dict
      "model" (dict "device" (ternary "cuda" "cpu" (gt (int .Values.replicas.gpusPerPod) 0)))
      "gateway" (dict "host" "0.0.0.0" "port" 50051 "http_port" 9464)
      "security" $security
      "cluster" $cluster
      "alerts" (dict "folder" "/var/lib/sightline/alerts")
      "kubernetes" (dict "enabled" .Values.cameras.enabled) -}}
{{- if .Values.kvRedis.enabled -}}
{{- $url := printf "://:${KV_REDIS_PASSWORD}@%s-kv-redis:6379/0" (include "sightline.fullname" .) -}}
{{- $files := "/etc/sightline/internal-tls" -}}
{{- /* All processes share one certificate, whose name is not the Service's: check the CA, not the host name. */ -}}
{{- $tls := printf "?ssl_ca_certs=%s/ca.crt&ssl_certfile=%s/tls.crt&ssl_keyfile=%s/tls.key&ssl_check_hostname=false" $files $files $files -}}
{{- $_ := set $own "tiers" (dict "redis_url" (ternary (printf "rediss%s%s" $url $tls) (printf "redis%s" $url) (hasKey $secrets "internalTls"))) -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config | default (include "sightline.demo" . | fromYaml)) $own) -}}
{{- end -}}

{{/* Default configuration: the bundled model on a demo clip, so that a bare install shows something. */}}
{{- define "sightline.demo" -}}
model: {name: demo, threads: 2}
sampling: {anchor_interval_s: 4}
window: {length_s: 20, stride_s: 4}
questions: [{id: intrusion, text: "Is someone inside the marked zone?", threshold: 0.51}]
cameras: [{name: entrance, source: "demo://gate", source_options: {loop: true, realtime: true}}]
{{- end -}}

{{/* serveConfigV2. A changed argument restarts its application, so "replicas" gets only the keys it reads. */}}
{{- define "sightline.serve" -}}
{{- $all := include "sightline.configuration" . | fromYaml -}}
{{- $replicas := omit (deepCopy $all) "cameras" "questions" "sampling" "pruning" "window" "source" "alerts" "clips" "gateway" "kubernetes" -}}
{{- $_ := set $replicas "cluster" (omit $replicas.cluster "gateways" "decoders" "max_decoders" "replicas") -}}
{{- $_ := unset $replicas.cluster.placement "gateway" -}}
proxy_location: Disabled
applications:
  - name: processes
    route_prefix: null
    import_path: actors.serve_app:processes
    args:
      configuration:
        {{- toYaml $all | nindent 8 }}
  - name: replicas
    route_prefix: null
    import_path: actors.serve_app:replicas
    args:
      configuration:
        {{- toYaml $replicas | nindent 8 }}
    # Not an argument: a changed argument restarts all replicas.
    deployments: [{name: replica, num_replicas: {{ $all.cluster.replicas }}}]
{{- end -}}
