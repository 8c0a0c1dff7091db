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

{{- /* What a server and a replica of the fleet have in common: settings, probes, drain, resources. */}}
{{- define "quire.serverParts" -}}
env:
  - {name: QUIRE_HOST, value: 0.0.0.0}
  - {name: QUIRE_PORT, value: "8000"}
  - name: QUIRE_API_KEY
    valueFrom:
      secretKeyRef: {name: {{ .Values.secretName }}, key: api-key}
  - {name: QUIRE_RESTART_ENGINE, value: {{ .Values.restartEngine | quote }}}
  - {name: QUIRE_GRACE_SECONDS, value: {{ .Values.graceSeconds | quote }}}
  {{- range $name, $value := .Values.settings }}
  - {name: QUIRE_{{ $name }}, value: {{ $value | quote }}}
  {{- end }}
ports:
  - {name: http, containerPort: 8000}
startupProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 5
  timeoutSeconds: 4
  failureThreshold: {{ div .Values.startupSeconds 5 }}
readinessProbe:
  httpGet: {path: /health, port: http}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  exec:
    command:
      - python
      - -c
      - 'import http.client, json, sys; c = http.client.HTTPConnection("127.0.0.1", 8000, timeout=4); c.request("GET", "/health"); h = json.load(c.getresponse()); sys.exit(h["state"] == "dead" or (h["state"] == "ready" and not h["ok"]))'
  periodSeconds: 20
  timeoutSeconds: 8
  failureThreshold: 4
lifecycle:
  preStop:
    sleep: {seconds: {{ .Values.preStopSeconds }}}
resources:
  requests: {cpu: {{ .Values.cpu | quote }}, memory: {{ .Values.memory }}}
  limits: {memory: {{ .Values.memory }}}
{{- end }}

{{- define "quire.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "quire.rayPod" -}}
enableServiceLinks: false
securityContext:
  {{- include "quire.podSecurity" . | nindent 2 }}
volumes:
  - name: models
    persistentVolumeClaim: {claimName: {{ .Values.name }}-models}
  - name: keys
    secret: {secretName: {{ .Values.secretName }}}
  - name: tmp
    emptyDir: {}
{{- end }}

{{- define "quire.rayContainerParts" -}}
image: {{ .Values.ray.image | quote }}
env:
  - {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
  - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
volumeMounts:
  - {name: models, mountPath: /models, readOnly: true}
  - {name: keys, mountPath: /keys, readOnly: true}
  - {name: tmp, mountPath: /tmp}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}
