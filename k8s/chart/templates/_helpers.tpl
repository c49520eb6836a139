{{- /* The prefix of names: the release's name, if it contains the chart's. */}}
{{- define "kvatlas.fullname" -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := .Values.nameOverride | default .Chart.Name }}
{{- contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- /* Labels of every object. */}}
{{- define "kvatlas.labels" -}}
app.kubernetes.io/part-of: kvatlas
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* An object's metadata: (list . name labels annotations). A nil name is left out. */}}
{{- define "kvatlas.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
labels:
  {{- include "kvatlas.labels" $root | nindent 2 }}
  {{- with index . 2 }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (index . 3 | default dict) ($root.Values.commonAnnotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* One of our images: (list . name). */}}
{{- define "kvatlas.image" -}}
{{- $root := index . 0 -}}
{{- with $root.Values.image.registry | default ($root.Values.global).imageRegistry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- index . 1 }}
{{- with index $root.Values.image.digests (index . 1) }}@{{ . }}
{{- else }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{- define "kvatlas.pullSecrets" -}}
{{- with concat .Values.image.pullSecrets ((.Values.global).imagePullSecrets | default list) }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The Secret that says where a role's servers are: (list . role). */}}
{{- define "kvatlas.secret" -}}
{{- $root := index . 0 -}}
{{- index $root.Values.secrets.names (index . 1) | default (printf "%s-%s" (include "kvatlas.fullname" $root) (index . 1)) }}
{{- end }}

{{- define "kvatlas.serviceAccount" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $account := index . 2 -}}
{{- $account.name | default ($account.create | ternary $name "default") }}
{{- end }}

{{- /* The part of a pod's spec that is the same for every Deployment: (list . name values). */}}
{{- define "kvatlas.pod" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $values := index . 2 -}}
{{- include "kvatlas.pullSecrets" $root }}
{{- if or $values.serviceAccount.create $values.serviceAccount.name }}
serviceAccountName: {{ include "kvatlas.serviceAccount" (list $root $name $values.serviceAccount) }}
{{- end }}
enableServiceLinks: false
{{- with $values.priorityClassName | default ($root.Values.priorityClasses.enabled | ternary (printf "%s-service" (include "kvatlas.fullname" $root)) "") }}
priorityClassName: {{ . }}
{{- end }}
securityContext:
  {{- $context := dict "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "seccompProfile" (dict "type" "RuntimeDefault") }}
  {{- toYaml (mergeOverwrite $context (deepCopy $values.podSecurityContext)) | nindent 2 }}
{{- if $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
{{- else }}
topologySpreadConstraints:
  {{- range $values.spreadOver }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        app.kubernetes.io/name: {{ $name }}
  {{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with index $values $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $values.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.podSpec }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* A container's probes: (list values kind handlers), with a handler each for startup, liveness and readiness. A container may
wait for its servers for up to a day. */}}
{{- define "kvatlas.probes" -}}
{{- $values := index . 0 -}}{{- $kind := index . 1 -}}{{- $handlers := index . 2 -}}
{{- $times := dict "startup" (dict "periodSeconds" 2 "failureThreshold" 43200) "liveness" (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6) "readiness" (dict "periodSeconds" 5 "timeoutSeconds" 2) -}}
{{- range $name, $time := $times }}
{{- $handler := index $handlers $name }}
{{- if and (eq $kind "httpGet") ($values.tls).secret }}{{ $handler = merge (dict "scheme" "HTTPS") $handler }}{{ end }}
{{ $name }}Probe:
  {{- toYaml (mergeOverwrite $time (dict $kind $handler) (deepCopy (index $values.probes $name))) | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvatlas.containerSecurity" -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) }}
{{- toYaml (mergeOverwrite $context (deepCopy .securityContext)) }}
{{- end }}

{{- /* Files of Secrets that a process reads, and reads again when they change: variables by path. (list . role values) -> a
list of {name, secret, optional, keys, variables} as YAML. */}}
{{- define "kvatlas.files" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $values := index . 2 -}}
{{- $tls := $root.Values.tls -}}{{- $full := include "kvatlas.fullname" $root -}}
{{- $readsNats := or (eq $role "indexer") (eq $role "publisher") $values.replicaOfIndex -}}{{- $readsRedis := ne $role "publisher" -}}
{{- $variables := dict -}}
{{- if and $tls.nats.privateAuthority $readsNats }}{{ $_ := set $variables "KVATLAS_NATS_CA_FILE" "ca.crt" }}{{ end -}}
{{- if and $tls.redis.privateAuthority $readsRedis }}{{ $_ := set $variables "KVATLAS_REDIS_CA_FILE" "ca.crt" }}{{ end -}}
- {name: ca, secret: {{ $tls.authoritySecret | default (printf "%s-ca" $full) }}, optional: {{ empty $variables }}, keys: [ca.crt], variables: {{ toJson $variables }}}
{{- $variables = dict -}}
{{- range $server, $reads := dict "nats" $readsNats "redis" $readsRedis }}
{{- if and $reads (index $tls $server).clientCertificates }}
{{- $_ := set $variables (printf "KVATLAS_%s_CERT_FILE" (upper $server)) "tls.crt" }}
{{- $_ := set $variables (printf "KVATLAS_%s_KEY_FILE" (upper $server)) "tls.key" }}
{{- end }}
{{- end }}
{{- if $variables }}
- {name: client-tls, secret: {{ index $tls.clientSecrets $role | default (printf "%s-%s-tls" $full $role) }}, keys: [tls.crt, tls.key], variables: {{ toJson $variables }}}
{{- end }}
{{- with ($values.tls).secret }}
{{- $variables = ternary (dict "KVATLAS_TLS_CERTIFICATE" "tls.crt" "KVATLAS_TLS_KEY" "tls.key") (dict "KVATLAS_HTTP_CERT_FILE" "tls.crt" "KVATLAS_HTTP_KEY_FILE" "tls.key") (eq $values.kind "epp") }}
- {name: server-tls, secret: {{ . }}, keys: [tls.crt, tls.key], variables: {{ toJson $variables }}}
{{- end }}
{{- $secrets := dict "identities" "KVATLAS_IDENTITIES" "tokens" "KVATLAS_HTTP_TOKEN_FILE" "controlTokens" "KVATLAS_CONTROL_TOKEN_FILE" "engineKeys" "KVATLAS_ENGINE_KEY_FILE" }}
{{- range $key, $variable := $secrets }}
{{- $given := index $values $key | default dict }}
{{- if $given.secret }}
- {name: {{ kebabcase $key }}, secret: {{ $given.secret }}, keys: [{{ $given.key }}], variables: {{ toJson (dict $variable $given.key) }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* A container's environment: (list . role values) -> the variables, without the key `env`. */}}
{{- define "kvatlas.env" -}}
{{- $values := index . 2 }}
{{- range include "kvatlas.files" . | fromYamlArray }}
{{- $folder := .name }}
{{- range $variable, $key := .variables }}
- name: {{ $variable }}
  value: /etc/kvatlas/{{ $folder }}/{{ $key }}
{{- end }}
{{- end }}
{{- with ($values.tokenizer).volume }}
- name: KVATLAS_TOKENIZER
  value: /etc/kvatlas/tokenizer
{{- end }}
{{- with $values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvatlas.envFrom" -}}
{{- $root := index . 0 -}}{{- $values := index . 2 -}}
- configMapRef:
    name: {{ include "kvatlas.fullname" $root }}-telemetry
- secretRef:
    name: {{ include "kvatlas.secret" (list $root (index . 1)) }}
{{- with $values.extraEnvFrom }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvatlas.volumeMounts" -}}
{{- $values := index . 2 }}
{{- range include "kvatlas.files" . | fromYamlArray }}
- name: {{ .name }}
  mountPath: /etc/kvatlas/{{ .name }}
  readOnly: true
{{- end }}
{{- if ($values.tokenizer).volume }}
- name: tokenizer
  mountPath: /etc/kvatlas/tokenizer
  readOnly: true
  {{- with $values.tokenizer.subPath }}
  subPath: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvatlas.volumes" -}}
{{- $values := index . 2 }}
{{- range include "kvatlas.files" . | fromYamlArray }}
- name: {{ .name }}
  secret:
    secretName: {{ .secret }}
    {{- if .optional }}
    optional: true
    {{- end }}
    items:
      {{- range .keys }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
{{- end }}
{{- with ($values.tokenizer).volume }}
- name: tokenizer
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* The objects beside a Deployment: (list . name values). */}}
{{- define "kvatlas.companions" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $values := index . 2 -}}
{{- if $values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "kvatlas.metadata" (list $root $name nil nil) | nindent 2 }}
spec:
  {{- with $values.podDisruptionBudget.minAvailable }}
  minAvailable: {{ . }}
  {{- else }}
  maxUnavailable: {{ $values.podDisruptionBudget.maxUnavailable }}
  {{- end }}
  {{- with $values.podDisruptionBudget.unhealthyPodEvictionPolicy }}
  unhealthyPodEvictionPolicy: {{ . }}
  {{- end }}
  selector:
    matchLabels:
      app.kubernetes.io/name: {{ $name }}
{{- end }}
{{- if $values.serviceAccount.create }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "kvatlas.metadata" (list $root (include "kvatlas.serviceAccount" (list $root $name $values.serviceAccount)) nil $values.serviceAccount.annotations) | nindent 2 }}
automountServiceAccountToken: false # a Deployment that needs it asks for it
{{- end }}
{{- end }}

{{- define "kvatlas.service" -}}
{{- if ne .type "ClusterIP" }}
type: {{ .type }}
{{- end }}
{{- with .clusterIP }}
clusterIP: {{ . }}
{{- end }}
{{- range $key := list "loadBalancerClass" "loadBalancerSourceRanges" "externalTrafficPolicy" "ipFamilyPolicy" }}
{{- with index $ $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Each pool's values as a list: the gateway's own, overridden by each of gateway.pools. */}}
{{- define "kvatlas.pools" -}}
{{- $full := include "kvatlas.fullname" . -}}
{{- $common := mergeOverwrite (deepCopy .Values.workloads) (omit .Values.gateway "pools") (dict "kind" "epp") -}}
{{- range .Values.gateway.pools | default (list (dict)) }}
{{- $suffix := empty .name | ternary "" (printf "-%s" .name) -}}
{{- $names := dict "pool" (printf "%s%s" $full $suffix) "picker" (printf "%s-epp%s" $full $suffix) -}}
{{- $one := mergeOverwrite (deepCopy $common) (deepCopy .) $names -}}
{{- $_ := set $one "engineLabels" (.engineLabels | default $common.engineLabels) }}
{{- list $one | toYaml | nindent 0 }}
{{- end }}
{{- end }}
