{{- /* Labels of every object. */}}
{{- define "kvatlas.labels" -}}
app.kubernetes.io/part-of: kvatlas
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* One of our images: (list . name). */}}
{{- define "kvatlas.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- index . 1 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}
