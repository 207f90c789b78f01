{{- /* The specification of the cluster, in the words of `penstock serve --config`. */ -}}
{{- define "penstock.spec" -}}
{{- with include "penstock.modelFolder" . -}}
model: {{ . }}
{{ end -}}
pool_nodes: true
log_format: {{ .Values.logFormat }}
routers: {{ .Values.router.replicas }}
router:
  host: 0.0.0.0
  http_port: {{ .Values.router.httpPort }}
  grpc_port: {{ .Values.router.grpcPort }}
  max_queued: {{ .Values.router.maxQueued }}
  drain_seconds: {{ .Values.router.drainSeconds }}
  vllm_metrics: {{ .Values.router.vllmMetrics }}
  {{- with include "penstock.modelName" . }}
  model_name: {{ . | quote }}
  {{- end }}
  {{- if .Values.router.apiKeysSecret.name }}
  api_keys_file: /etc/penstock-keys/keys
  {{- end }}
{{- with .Values.engine }}
engine: {{- toYaml . | nindent 2 }}
{{- end }}
pools:
{{- range $role := include "penstock.roles" . | fromJsonArray }}
  {{ $role }}: {{- include "penstock.specPool" (dict "root" $ "role" $role) | trim | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "penstock.specPool" -}}
{{- $pool := include "penstock.pool" . | fromYaml -}}
{{- range $key := list "replicas" "tp" "pp" "ep" "gpus" }}
{{ $key }}: {{ get $pool $key | int }}
{{- end }}
min_replicas: {{ $pool.least | int }}
max_replicas: {{ $pool.most | int }}
cpus: {{ $pool.cpus }}
{{- with $pool.threads }}
threads: {{ . | int }}
{{- end }}
{{- end -}}
