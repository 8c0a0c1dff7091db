{{- define "quire.labels" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/part-of: {{ .Values.name }}
{{- end }}

{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ .Values.name }}
app.kubernetes.io/component: server
{{- end }}

{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
