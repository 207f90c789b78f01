{{- /* The model's name in the API: the key of its entry. */ -}}
{{- define "penstock.modelName" -}}
{{- keys .Values.models | sortAlpha | first -}}
{{- end -}}

{{- /* The entry of the model; empty: the bundled model. */ -}}
{{- define "penstock.model" -}}
{{- range $name, $model := .Values.models -}}
{{- if eq $name (include "penstock.modelName" $) -}}{{- toYaml $model -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Where the checkpoint comes from; empty: it is in the image. */ -}}
{{- define "penstock.source" -}}
{{- with (include "penstock.model" . | fromYaml).source -}}{{- toYaml . -}}{{- end -}}
{{- end -}}

{{- /* The folder of the checkpoint, in every pod that reads it; empty: the bundled one. */ -}}
{{- define "penstock.modelFolder" -}}
{{- with include "penstock.source" . | fromYaml -}}
{{- if .hub -}}/models/{{ base .hub.name }}
{{- else if .pvc -}}{{ clean (printf "/models/%s" (default "" .pvc.path)) }}
{{- else if .image -}}/models/{{ base .image.path }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.modelVolume" -}}
{{- $source := include "penstock.source" . | fromYaml -}}
{{- if $source.pvc -}}
- name: models
  persistentVolumeClaim: {claimName: {{ $source.pvc.claimName | quote }}, readOnly: true}
{{- else if $source -}}
- name: models
  emptyDir: {}
{{- end -}}
{{- end -}}

{{- define "penstock.modelMount" -}}
{{- if include "penstock.source" . -}}
- {name: models, mountPath: /models, readOnly: true}
{{- end -}}
{{- end -}}

{{- /* Args: root, component, weights. The init container that fills the model's folder; routers and the driver
need no weights. */ -}}
{{- define "penstock.modelFetch" -}}
{{- $source := include "penstock.source" .root | fromYaml -}}
{{- if $source.hub }}
- name: fetch-model
  image: {{ include "penstock.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -m, penstock.cli.fetch]
  args:
    - {{ $source.hub.name }}
    - {{ include "penstock.modelFolder" .root }}
    {{- if not .weights }}
    - --without-weights
    {{- end }}
    {{- with $source.hub.revision }}
    - {{ printf "--revision=%s" . | quote }}
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- with $source.hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .name | quote }}, key: {{ .key | quote }}}}
    {{- end }}
  securityContext: {{- include "penstock.containerSecurity" true | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- else if $source.image }}
- name: copy-model
  image: {{ $source.image.reference | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -ec]
  args:
    - |
      mkdir -p "$TO" && cd "$FROM"
      for file in *; do
        {{- if not .weights }}
        case "$file" in *.safetensors) continue ;; esac
        {{- end }}
        cp -r "$file" "$TO/"
      done
  env:
    - {name: FROM, value: {{ $source.image.path | quote }}}
    - {name: TO, value: {{ include "penstock.modelFolder" .root | quote }}}
  securityContext: {{- include "penstock.containerSecurity" true | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
{{- end }}
{{- end -}}
