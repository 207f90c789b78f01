{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.user | int64 }}
runAsGroup: {{ .Values.podSecurity.user | int64 }}
fsGroup: {{ .Values.podSecurity.user | int64 }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- /* Arg: whether the root file system is read-only. */ -}}
{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
readOnlyRootFilesystem: {{ . }}
{{- end -}}

{{- /* Flags of `ray start` on a node. Arg: the node with component and, for workers, podCpus, podGpus,
ranks. A node has one unit per rank of the Ray resource that is named like its component. */ -}}
{{- define "penstock.rayFlags" -}}
{{- $flags := dict "node-manager-port" "6380" "object-store-memory" "83886080" -}}
{{- if eq .component "head" -}}
{{- $_ := set $flags "port" "6379" -}}
{{- $_ := set $flags "num-cpus" "0" -}}
{{- $_ := set $flags "include-dashboard" "false" -}}
{{- else -}}
{{- $_ := set $flags "num-cpus" (ceil .podCpus | int | toString) -}}
{{- $_ := set $flags "num-gpus" (int .podGpus | toString) -}}
{{- $_ := set $flags "resources" (dict .component (int .ranks) | toJson) -}}
{{- end -}}
{{- toYaml $flags -}}
{{- end -}}

{{- define "penstock.env" -}}
- {name: HOME, value: /tmp}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_AUTH_MODE, value: token}
- name: RAY_AUTH_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "penstock.authSecret" . | quote }}, key: auth_token}}
{{- end -}}

{{- /* Args: root, component. Init container that waits until Ray's head replies. */ -}}
{{- define "penstock.waitForHead" -}}
- name: wait-for-head
  image: {{ include "penstock.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - >-
      until ray health-check --address {{ include "penstock.headAddress" .root }};
      do echo "waiting for Ray's head"; sleep 2; done
  env: {{- include "penstock.env" .root | nindent 4 }}
  securityContext: {{- include "penstock.containerSecurity" true | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
{{- end -}}

{{- /* Probes of the node's Ray process, through its standard gRPC health service. */ -}}
{{- define "penstock.rayProbes" -}}
startupProbe:
  grpc: {port: 6380}
  periodSeconds: 5
  failureThreshold: {{ divf .Values.probes.startupSeconds 5 | ceil | int }}
livenessProbe:
  grpc: {port: 6380}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- /* A pod that is a Ray node. Args: root, node (with component, cpus or podCpus, memory, ...). */ -}}
{{- define "penstock.rayPod" -}}
{{- $root := .root -}}{{- $node := .node -}}
{{- $kuberay := eq $root.Values.cluster.mode "kuberay" -}}
{{- $isHead := eq $node.component "head" -}}
metadata:
  labels: {{- include "penstock.podLabels" (dict "root" $root "component" $node.component) | nindent 4 }}
  {{- $annotations := deepCopy (default dict $node.annotations) }}
  {{- /* KubeRay ignores tolerations when it looks for changes in a RayCluster, but not annotations. */}}
  {{- if and $kuberay $node.tolerations }}
  {{- $_ := set $annotations "checksum/tolerations" (toJson $node.tolerations | sha256sum) }}
  {{- end }}
  {{- with $annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if not (and $kuberay $isHead) }}
  automountServiceAccountToken: false
  {{- end }}
  {{- if and $kuberay (not $isHead) }}
  restartPolicy: Never
  {{- end }}
  terminationGracePeriodSeconds: {{ include "penstock.graceSeconds" $root }}
  securityContext: {{- include "penstock.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- range . }}
    - name: {{ . | quote }}
  {{- end }}{{ end }}
  {{- with $node.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $node.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with include "penstock.where" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- $init := list }}
  {{- if not $isHead }}
  {{- $init = append $init (include "penstock.modelFetch" (dict "root" $root "component" $node.component "weights" (ne $node.component "router"))) }}
  {{- if not $kuberay }}{{ $init = append $init (include "penstock.waitForHead" (dict "root" $root "component" $node.component)) }}{{ end }}
  {{- end }}
  {{- with compact $init }}
  initContainers: {{- range . }}{{ trim . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    {{- include "penstock.rayContainer" . | nindent 4 }}
  volumes:
    - {name: tmp, emptyDir: {}}
    - {name: leave, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $node.shm | quote }}}
    {{- if not $isHead }}
    {{- with include "penstock.modelVolume" $root }}{{ . | nindent 4 }}{{ end }}
    {{- end }}
{{- end -}}

{{- define "penstock.rayContainer" -}}
{{- $root := .root -}}{{- $node := .node -}}{{- $isHead := eq .node.component "head" -}}
- name: ray
  image: {{ include "penstock.image" (dict "root" $root "component" $node.component) | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- if ne $root.Values.cluster.mode "kuberay" }}
  command: [ray, start]
  args:
    {{- if $isHead }}
    - --head
    {{- else }}
    - --address={{ include "penstock.headAddress" $root }}
    {{- end }}
    {{- range $flag, $value := include "penstock.rayFlags" $node | fromYaml }}
    - {{ printf "--%s=%s" $flag $value | quote }}
    {{- end }}
    - --block
  {{- end }}
  env:
    {{- include "penstock.env" $root | nindent 4 }}
    - {name: PENSTOCK_LEAVE_FOLDER, value: /run/penstock}
    {{- with $node.env }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- if eq $node.component "router" }}
  ports:
    - {name: http, containerPort: {{ $root.Values.router.httpPort }}}
    - {name: grpc, containerPort: {{ $root.Values.router.grpcPort }}}
    - {name: admin, containerPort: {{ $root.Values.router.adminPort }}}
  {{- else if $isHead }}
  ports:
    - {name: gcs-server, containerPort: 6379}
  {{- end }}
  resources:
    {{- $amounts := dict "cpu" (toString $node.podCpus) "memory" $node.memory }}
    {{- if int $node.podGpus }}{{ $_ := set $amounts $node.gpuResource (int $node.podGpus | toString) }}{{ end }}
    requests: {{- toYaml $amounts | nindent 6 }}
    limits: {{- toYaml $amounts | nindent 6 }}
  {{- include "penstock.rayProbes" $root | nindent 2 }}
  readinessProbe:
    {{- if eq $node.component "router" }}
    httpGet: {path: /health, port: http} # it can queue requests
    {{- else if $isHead }}
    grpc: {port: 6380}
    {{- else }}
    # The worker has decoded a token recently; an idle one decodes canary tokens.
    exec: {command: [python, -m, penstock.cluster.kubernetes.readiness_probe, {{ $root.Values.probes.tokenSeconds | quote }}]}
    {{- end }}
    periodSeconds: {{ has $node.component (list "router" "head") | ternary 5 10 }}
    timeoutSeconds: {{ has $node.component (list "router" "head") | ternary 5 10 }}
  lifecycle:
    preStop:
      exec:
        {{- if $isHead }}
        # Wait for the other pods: nothing works without the head.
        command: [sleep, {{ include "penstock.leaveSeconds" $root | quote }}]
        {{- else }}
        command: [python, -m, penstock.cluster.kubernetes.node_drain, {{ include "penstock.leaveSeconds" $root | quote }}]
        {{- end }}
  securityContext: {{- include "penstock.containerSecurity" $node.readOnlyRootFilesystem | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: leave, mountPath: /run/penstock}
    - {name: shm, mountPath: /dev/shm}
    {{- if not $isHead }}
    {{- with include "penstock.modelMount" $root }}{{ . | nindent 4 }}{{ end }}
    {{- end }}
{{- end -}}

{{- /* Args: root, node. The node's affinity; with `near`, it prefers to be near other workers. */ -}}
{{- define "penstock.affinity" -}}
{{- $affinity := deepCopy (default dict .node.affinity) -}}
{{- if .node.near -}}
{{- $others := dict "key" "app.kubernetes.io/component" "operator" "NotIn" "values" (list "head" "router" "driver") -}}
{{- $selector := dict "matchLabels" (include "penstock.selector" .root | fromYaml) "matchExpressions" (list $others) -}}
{{- $term := dict "topologyKey" .node.near "labelSelector" $selector -}}
{{- $pods := default dict $affinity.podAffinity -}}
{{- $wishes := default list $pods.preferredDuringSchedulingIgnoredDuringExecution -}}
{{- $wishes = append $wishes (dict "weight" 100 "podAffinityTerm" $term) -}}
{{- $_ := set $pods "preferredDuringSchedulingIgnoredDuringExecution" $wishes -}}
{{- $_ := set $affinity "podAffinity" $pods -}}
{{- end -}}
{{- if $affinity -}}{{- toYaml $affinity -}}{{- end -}}
{{- end -}}

{{- /* Args: root, node (with nodeSelector, tolerations, affinity, near, topologySpread). Scheduling
fields of a pod. */ -}}
{{- define "penstock.where" -}}
{{- with .node.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .node.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "penstock.affinity" . }}
affinity: {{- . | nindent 2 }}
{{- end }}
{{- with .node.topologySpread }}
topologySpreadConstraints:
{{- range . }}
  - topologyKey: {{ .topologyKey | quote }}
    maxSkew: {{ default 1 .maxSkew | int }}
    whenUnsatisfiable: {{ default "ScheduleAnyway" .whenUnsatisfiable }}
    labelSelector:
      matchLabels: {{- include "penstock.componentSelector" (dict "root" $.root "component" $.node.component) | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The kinds of Ray nodes, by component, all with the same keys. */ -}}
{{- define "penstock.headNode" -}}
{{- $head := deepCopy .Values.ray.head -}}
{{- toYaml (merge (dict "component" "head" "podCpus" $head.cpus "podGpus" 0 "shm" "256Mi" "readOnlyRootFilesystem" true) $head) -}}
{{- end -}}

{{- define "penstock.routerNode" -}}
{{- $router := pick .Values.router "memory" "nodeSelector" "tolerations" "affinity" "topologySpread" -}}
{{- toYaml (merge (dict "component" "router" "podCpus" .Values.router.cpus "podGpus" 0 "ranks" 1 "shm" "256Mi" "readOnlyRootFilesystem" true) $router) -}}
{{- end -}}

{{- define "penstock.poolNode" -}}
{{- $pool := include "penstock.pool" . | fromYaml -}}
{{- toYaml (merge (dict "component" .role) $pool) -}}
{{- end -}}
