{{- define "penstock.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- /* 40, because KubeRay adds up to 10 characters and cuts names at 50. */ -}}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* Labels of all pods of the release. In its own pods KubeRay sets other values of other labels. */ -}}
{{- define "penstock.selector" -}}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* Args: root, component. Labels of an object of the chart. They change with the chart's version, so
pod templates must not have them: a changed template replaces all pods. */ -}}
{{- define "penstock.labels" -}}
{{ include "penstock.selector" .root }}
app.kubernetes.io/name: penstock
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "penstock.componentSelector" -}}
{{ include "penstock.selector" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- /* Args: root, component. Labels of a pod. */ -}}
{{- define "penstock.podLabels" -}}
{{ include "penstock.componentSelector" . }}
app.kubernetes.io/name: penstock
{{- end -}}

{{- /* Args: root, component. The image of a pod and of its init containers. */ -}}
{{- define "penstock.image" -}}
{{- $own := .root.Values.image -}}
{{- if and (has .component (list "router" "head")) .root.Values.routerImage.repository -}}
{{- $own = .root.Values.routerImage -}}
{{- end -}}
{{- with $own -}}
{{ .repository }}{{ ternary (printf "@%s" .digest) (printf ":%s" (default $.root.Chart.AppVersion .tag)) (ne .digest "") }}
{{- end -}}
{{- end -}}

{{- define "penstock.headAddress" -}}
{{- $service := ternary "head-svc" "head" (eq .Values.cluster.mode "kuberay") -}}
{{ include "penstock.fullname" . }}-{{ $service }}:6379
{{- end -}}

{{- define "penstock.authSecret" -}}
{{ default (include "penstock.fullname" .) .Values.ray.authSecret }}
{{- end -}}

{{- /* JSON list of the pools that have workers or may get some. */ -}}
{{- define "penstock.roles" -}}
{{- $roles := list -}}
{{- range $role := list "prefill" "decode" "mixed" -}}
{{- $pool := include "penstock.pool" (dict "root" $ "role" $role) | fromYaml -}}
{{- if gt (int $pool.most) 0 -}}{{- $roles = append $roles $role -}}{{- end -}}
{{- end -}}
{{- toJson $roles -}}
{{- end -}}

{{- /* Args: root, role. A pool merged with its defaults, and the derived values least, most, ranks,
podCpus and podGpus. */ -}}
{{- define "penstock.pool" -}}
{{- $own := get .root.Values.pools .role | default dict -}}
{{- $pool := mergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy $own) -}}
{{- $ranks := mul $pool.tp $pool.pp | int -}}
{{- $_ := set $pool "role" .role -}}
{{- $_ := set $pool "ranks" $ranks -}}
{{- $_ := set $pool "podGpus" (mul $ranks $pool.gpus) -}}
{{- $_ := set $pool "podCpus" (mulf $ranks $pool.cpus) -}}
{{- $_ := set $pool "least" (kindIs "invalid" $pool.minReplicas | ternary $pool.replicas $pool.minReplicas) -}}
{{- $_ := set $pool "most" (kindIs "invalid" $pool.maxReplicas | ternary $pool.replicas $pool.maxReplicas) -}}
{{- toYaml $pool -}}
{{- end -}}

{{- /* Time limit of a preStop hook: the router's drain, then 20 s for the driver to stop processes. */ -}}
{{- define "penstock.leaveSeconds" -}}
{{ add .Values.router.drainSeconds 20 }}
{{- end -}}

{{- define "penstock.graceSeconds" -}}
{{- $least := add (include "penstock.leaveSeconds" .) 15 -}}
{{- default $least .Values.terminationGracePeriodSeconds -}}
{{- end -}}

{{- /* Checks that the schema cannot express. */ -}}
{{- define "penstock.check" -}}
{{- if gt (len .Values.models) 1 -}}
{{- fail (printf "models: this version serves one model; found %s: keep one" (keys .Values.models | sortAlpha | join ", ")) -}}
{{- end -}}
{{- $counts := dict -}}
{{- /* For each setting, the values of all pools. The driver compares them as they are set. */ -}}
{{- $found := dict "blockSize" dict "tp" dict "pp" dict "ep" dict -}}
{{- range $role := list "prefill" "decode" "mixed" -}}
{{- $pool := include "penstock.pool" (dict "root" $ "role" $role) | fromYaml -}}
{{- $least := int $pool.least -}}{{- $most := int $pool.most -}}{{- $replicas := int $pool.replicas -}}
{{- $_ := set $counts $role $most -}}
{{- range $key, $values := $found -}}
{{- $value := get $pool $key -}}
{{- if $most -}}{{- $_ := set $values (ternary ($value | int | toString) "default" (not (empty $value))) $role -}}{{- end -}}
{{- end -}}
{{- if or (lt $replicas $least) (gt $replicas $most) -}}
{{- fail (printf "pools.%s: replicas: %d is not between minReplicas (%d) and maxReplicas (%d): correct one of them" $role $replicas $least $most) -}}
{{- end -}}
{{- if gt (int $pool.podGpus) (int $pool.gpusPerNode) -}}
{{- fail (printf "pools.%s: tp: %d and pp: %d need %d GPUs in one pod, but no node has more than gpusPerNode (%d): use smaller tp or pp, or correct gpusPerNode" $role (int $pool.tp) (int $pool.pp) (int $pool.podGpus) (int $pool.gpusPerNode)) -}}
{{- end -}}
{{- if mod (int $pool.tp) (int $pool.ep) -}}
{{- fail (printf "pools.%s: ep: %d does not divide tp (%d): the tp ranks of a stage form ep groups of equal size; use a divisor of tp" $role (int $pool.ep) (int $pool.tp)) -}}
{{- end -}}
{{- if and (eq $.Values.standalone.autoscaler "hpa") (eq $least 0) (gt $most 0) -}}
{{- fail (printf "pools.%s: minReplicas: an HPA cannot scale to 0: set at least 1, or standalone.autoscaler to keda" $role) -}}
{{- end -}}
{{- range $each := $pool.env -}}
{{- if has $each.name (list "HOME" "RAY_AUTH_MODE" "RAY_AUTH_TOKEN" "PENSTOCK_LEAVE_FOLDER") -}}
{{- fail (printf "pools.%s.env: %s is set by the chart: remove it" $role $each.name) -}}
{{- end -}}
{{- if and (hasKey $each "value") (regexMatch "(TOKEN|SECRET|PASSWORD|_KEY)$" (upper $each.name)) -}}
{{- fail (printf "pools.%s.env: %s: a secret must not be given as a plain value: use valueFrom with a secretKeyRef" $role $each.name) -}}
{{- end -}}
{{- end -}}
{{- $none := and (eq $.Values.cluster.mode "standalone") (eq $.Values.standalone.autoscaler "none") -}}
{{- if and $none (ne $least $most) -}}
{{- fail (printf "pools.%s: minReplicas and maxReplicas differ, but standalone.autoscaler is none: make them equal, or set it to keda or hpa" $role) -}}
{{- end -}}
{{- end -}}
{{- range $key, $values := $found -}}
{{- if and (include "penstock.model" $ | fromYaml).deterministic (gt (len $values) 1) -}}
{{- fail (printf "models.%s.deterministic: all pools need the same %s, found %s: make them equal" (include "penstock.modelName" $) $key (keys $values | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
{{- $name := include "penstock.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the name %q is not valid for a Service (lower-case letters, digits and -, beginning with a letter): set fullnameOverride" $name) -}}
{{- end -}}
{{- if not (add $counts.prefill $counts.mixed) -}}
{{- fail "pools: no worker prefills: give prefill or mixed at least one replica" -}}
{{- end -}}
{{- if not (add $counts.decode $counts.mixed) -}}
{{- fail "pools: no worker decodes: give decode or mixed at least one replica" -}}
{{- end -}}
{{- $least := add (include "penstock.leaveSeconds" .) 15 | int -}}
{{- $given := include "penstock.graceSeconds" . | int -}}
{{- if lt $given $least -}}
{{- fail (printf "terminationGracePeriodSeconds: %d is too short: router.drainSeconds requires at least %d: increase it, or leave it out" $given $least) -}}
{{- end -}}
{{- $canary := default 10 .Values.engine.canary_seconds -}}
{{- if lt (float64 .Values.probes.tokenSeconds) (mulf 2 $canary) -}}
{{- fail (printf "probes.tokenSeconds: %d is less than twice engine.canary_seconds (%v), so idle workers would not stay ready: increase it" (int .Values.probes.tokenSeconds) $canary) -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled -}}
{{- fail "monitoring: serviceMonitor and podMonitor would scrape the same routers twice: enable only one" -}}
{{- end -}}
{{- if not (or .Values.router.apiKeysSecret.name .Values.router.keys .Values.router.allowAnonymous) -}}
{{- fail "router: there are no API keys: set apiKeysSecret.name or keys, or allowAnonymous to serve all who can reach the Service" -}}
{{- end -}}
{{- if and .Values.router.httpRoute.enabled (not .Values.router.httpRoute.parentRefs) -}}
{{- fail "router.httpRoute: parentRefs is empty, so no gateway would use the route: name a Gateway there" -}}
{{- end -}}
{{- if and (ne .Values.standalone.autoscaler "none") .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) -}}
{{- fail (printf "standalone.autoscaler: %s follows a metric of the routers, but networkPolicy.monitoring is empty, so Prometheus could not connect to adminPort: name its pods there, or disable networkPolicy" .Values.standalone.autoscaler) -}}
{{- end -}}
{{- range $monitor := list "serviceMonitor" "podMonitor" -}}
{{- include "penstock.checkMonitor" (dict "root" $ "monitor" $monitor) -}}
{{- end -}}
{{- if eq (int .Values.router.httpPort) (int .Values.router.grpcPort) -}}
{{- fail (printf "router: httpPort and grpcPort must differ; both are %d: change one of them" (int .Values.router.httpPort)) -}}
{{- end -}}
{{- if has (int .Values.router.adminPort) (list (int .Values.router.httpPort) (int .Values.router.grpcPort)) -}}
{{- fail (printf "router: adminPort must differ from httpPort and grpcPort, but it equals one of them (%d): choose another port" (int .Values.router.adminPort)) -}}
{{- end -}}
{{- range $port := list .Values.router.httpPort .Values.router.grpcPort .Values.router.adminPort -}}
{{- if has (int $port) (list 6379 6380 8080 52365) -}}
{{- fail (printf "router: port %d is used by Ray: choose another port" (int $port)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Args: root, monitor. Checks that Prometheus may connect and that the routers accept its key. */ -}}
{{- define "penstock.checkMonitor" -}}
{{- $own := get .root.Values.monitoring .monitor -}}
{{- if $own.enabled -}}
{{- if and .root.Values.networkPolicy.enabled (not .root.Values.networkPolicy.monitoring) -}}
{{- fail (printf "monitoring.%s: networkPolicy.monitoring is empty, so Prometheus could not connect to adminPort: name its pods there, or disable networkPolicy" .monitor) -}}
{{- end -}}
{{- $router := .root.Values.router -}}
{{- if or $router.apiKeysSecret.name $router.keys -}}
{{- $accepted := list -}}
{{- range $key := $router.keys -}}
{{- if has $key.role (list "metrics" "operator") -}}
{{- $accepted = append $accepted (printf "%s/%s" $key.secret.name $key.secret.key) -}}
{{- end -}}
{{- end -}}
{{- if not (has (printf "%s/%s" $own.apiKeySecret.name $own.apiKeySecret.key) $accepted) -}}
{{- fail (printf "monitoring.%s.apiKeySecret: with API keys, Prometheus needs one with the role metrics or operator: add it to router.keys and name the same Secret and key here" .monitor) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
