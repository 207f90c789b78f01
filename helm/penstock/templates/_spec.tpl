{{- /* The specification of the cluster, as `penstock serve --config` reads it. */ -}}
{{- define "penstock.spec" -}}
{{- if .Values.models -}}
models:
  {{ include "penstock.modelName" . | quote }}:
    path: {{ include "penstock.modelFolder" . | default "demo" | quote }}
    {{- range $key, $value := omit (include "penstock.model" . | fromYaml) "source" }}
    {{ $key }}: {{ kindIs "float64" $value | ternary (printf "%.0f" $value) (toJson $value) }}
    {{- end }}
{{ end -}}
pool_nodes: true
log_format: {{ .Values.logFormat }}
routers: {{ .Values.router.replicas }}
router:
  host: 0.0.0.0
  http_port: {{ .Values.router.httpPort }}
  grpc_port: {{ .Values.router.grpcPort }}
  admin_host: 0.0.0.0
  admin_port: {{ .Values.router.adminPort }}
  max_queued: {{ .Values.router.maxQueued | int64 }}
  routing: {{ .Values.router.routing }}
  {{- if not (kindIs "invalid" .Values.router.maxWaitSeconds) }}
  max_wait_seconds: {{ .Values.router.maxWaitSeconds | toJson }}
  {{- end }}
  {{- if not (kindIs "invalid" .Values.router.maxConnectionsPerAddress) }}
  max_connections_per_address: {{ .Values.router.maxConnectionsPerAddress | int64 }}
  {{- end }}
  {{- with .Values.router.allowedOrigins }}
  allowed_origins: {{ toJson . }}
  {{- end }}
  drain_seconds: {{ .Values.router.drainSeconds }}
  vllm_metrics: {{ .Values.router.vllmMetrics }}
  {{- if .Values.router.apiKeysSecret.name }}
  api_key_file: /etc/penstock-keys/keys
  {{- end }}
  allow_anonymous: {{ .Values.router.allowAnonymous }}
{{- with .Values.router.keys }}
keys:
  {{- range $name, $key := . }}
  {{ $name | quote }}: {role: {{ $key.role }}, file: /etc/penstock-keys/named/{{ $name }}}
  {{- end }}
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
{{- range $key := list "threads" "blockSize" "kvCacheMib" "maxSequences" "maxBatchedTokens" }}
{{- with get $pool $key }}
{{ snakecase $key }}: {{ . | int }}
{{- end }}
{{- end }}
{{- end -}}
