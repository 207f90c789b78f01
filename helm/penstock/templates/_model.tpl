{{- /* The folder of the checkpoint, in every pod that reads it; empty: the one that ships. */ -}}
{{- define "penstock.modelFolder" -}}
{{- with .Values.model -}}
{{- if .hub -}}/models/{{ base .hub.name }}
{{- else if .pvc -}}{{ clean (printf "/models/%s" (default "" .pvc.path)) }}
{{- else if .image -}}/models/{{ base .image.path }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.modelName" -}}
{{- if .Values.router.modelName -}}{{ .Values.router.modelName }}
{{- else if .Values.model.hub -}}{{ .Values.model.hub.name }}
{{- end -}}
{{- end -}}

{{- define "penstock.modelVolume" -}}
{{- if .Values.model.pvc -}}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.model.pvc.claimName }}, readOnly: true}
{{- else if .Values.model -}}
- name: models
  emptyDir: {}
{{- end -}}
{{- end -}}

{{- define "penstock.modelMount" -}}
{{- if .Values.model -}}
- {name: models, mountPath: /models, readOnly: true}
{{- end -}}
{{- end -}}

{{- /* root, weights: what fills the model's folder; routers and the driver do without the weights. */ -}}
{{- define "penstock.modelFetch" -}}
{{- $model := .root.Values.model -}}
{{- if $model.hub }}
- name: fetch-model
  image: {{ include "penstock.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -m, penstock.cli.fetch]
  args:
    - {{ $model.hub.name }}
    - {{ include "penstock.modelFolder" .root }}
    {{- if not .weights }}
    - --without-weights
    {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- with $model.hub.tokenSecret }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
    {{- end }}
  securityContext: {{- include "penstock.containerSecurity" true | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- else if $model.image }}
- name: copy-model
  image: {{ $model.image.reference }}
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
    - {name: FROM, value: {{ $model.image.path | quote }}}
    - {name: TO, value: {{ include "penstock.modelFolder" .root | quote }}}
  securityContext: {{- include "penstock.containerSecurity" true | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
{{- end }}
{{- end -}}
