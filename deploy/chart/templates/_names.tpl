{{- define "nobackfill.name" -}}
{{- printf "%s-%s" .Release.Name "gateway" | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "nobackfill.selector" -}}
app.kubernetes.io/name: nobackfill
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nobackfill.labels" -}}
{{ include "nobackfill.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "nobackfill.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "nobackfill.nobody" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}
