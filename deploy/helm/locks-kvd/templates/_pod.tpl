{{/* Pieces of pods, shared by the StatefulSet, the DaemonSet and the sidecar. */}}

{{- define "locks-kvd.podSecurity" -}}
runAsNonRoot: {{ ne .Values.security.memoryLock "root" }}
runAsUser: {{ ternary 0 65532 (eq .Values.security.memoryLock "root") }}
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
{{- if eq .Values.mode "node" }}
supplementalGroups: [{{ int .Values.socket.group }}]
{{- end }}
{{- with .Values.security.seLinuxLevel }}
seLinuxOptions: {level: {{ . | quote }}}
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* IPC_LOCK does nothing for a user other than root unless the program has it as a file capability. */}}
{{- define "locks-kvd.containerSecurity" -}}
allowPrivilegeEscalation: {{ eq .Values.security.memoryLock "capability" }}
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- if ne .Values.security.memoryLock "node" }}
  add: [IPC_LOCK]
{{- end }}
{{- end -}}

{{- define "locks-kvd.plainSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The daemon's container. Its argument is the root. In a pool a daemon listens at its own name in the headless
     Service, which the kubelet writes into the pod's hosts file: that name is its identity in the pool. */}}
{{- define "locks-kvd.container" -}}
name: locks-kvd
image: {{ include "locks-kvd.image" . | quote }}
imagePullPolicy: {{ .Values.image.policy }}
command: [locks-kvd]
args:
  - --config=/etc/locks-kvd/config/config.json
  {{- if eq .Values.mode "pool" }}
  - --control-address=$(KVD_ADDRESS)
  {{- end }}
env:
  - name: POD_NAME
    valueFrom: {fieldRef: {fieldPath: metadata.name}}
  - name: KVD_ADDRESS
    value: {{ ternary (printf "$(POD_NAME).%s:%d" (include "locks-kvd.membersHost" .) (int .Values.ports.control)) (printf "localhost:%d" (int .Values.ports.control)) (eq .Values.mode "pool") | quote }}
  - name: LOCKSCTL_DAEMONS
    value: $(KVD_ADDRESS)
  {{- range $name, $value := .Values.env }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
ports:
  - {name: control, containerPort: {{ int .Values.ports.control }}, protocol: TCP}
  - {name: data, containerPort: {{ int .Values.ports.dataFirst }}, protocol: TCP}
  - {name: health, containerPort: {{ int .Values.ports.health }}, protocol: TCP}
  - {name: metrics, containerPort: {{ int .Values.ports.metrics }}, protocol: TCP}
{{- /* At most five minutes to start: memory of large arenas is made in that time. */}}
startupProbe:
  grpc: {port: {{ int .Values.ports.health }}, service: startup}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  grpc: {port: {{ int .Values.ports.health }}, service: live}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc: {port: {{ int .Values.ports.health }}, service: ready}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
resources:
  requests:
    cpu: {{ .Values.resources.cpu | quote }}
    memory: {{ include "locks-kvd.memory" . }}
    {{- range $name, $count := .Values.resources.devices }}
    {{ $name }}: {{ $count | quote }}
    {{- end }}
  limits:
    memory: {{ include "locks-kvd.memory" . }}
    {{- range $name, $count := .Values.resources.devices }}
    {{ $name }}: {{ $count | quote }}
    {{- end }}
securityContext:
  {{- include "locks-kvd.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/locks-kvd/config, readOnly: true}
  {{- if .Values.tls.enabled }}
  - {name: tls, mountPath: /etc/locks-kvd/tls, readOnly: true}
  {{- end }}
  {{- range $i, $arena := .Values.arenas }}
  {{- if $arena.queryMetric }}
  - {name: query-metric-{{ $i }}, mountPath: /etc/locks-kvd/query-metric/{{ $i }}, readOnly: true}
  {{- end }}
  {{- end }}
  {{- if ne .Values.mode "pool" }}
  - {name: socket, mountPath: /run/locks-kvd}
  {{- end }}
{{- end -}}

{{- define "locks-kvd.volumes" -}}
- name: config
  configMap: {name: {{ include "locks-kvd.fullname" . }}}
{{- if .Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "locks-kvd.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- range $i, $arena := .Values.arenas }}
{{- if $arena.queryMetric }}
- name: query-metric-{{ $i }}
  configMap: {name: {{ $arena.queryMetric.configMap | quote }}}
{{- end }}
{{- end }}
{{- if eq .Values.mode "sidecar" }}
- name: socket
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- else if eq .Values.mode "node" }}
- name: socket
  hostPath: {path: {{ .Values.socket.hostPath | quote }}, type: Directory}
{{- end }}
{{- end -}}

{{/* A native sidecar for an engine's own pod: an entry of initContainers. It starts before the worker and stops
     after it. Use it with locks-kvd.volumes, and mount the volume `socket` at /run/locks-kvd in the worker. */}}
{{- define "locks-kvd.sidecar" -}}
{{ include "locks-kvd.container" . }}
restartPolicy: Always
{{- end -}}

{{/* Nothing that changes with the chart's version: a restarted daemon has lost its pages. */}}
{{- define "locks-kvd.podMetadata" -}}
labels:
  {{- include "locks-kvd.selector" . | nindent 2 }}
  {{- with .Values.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
annotations:
  checksum/config: {{ include "locks-kvd.config" . | sha256sum }}
  {{- with .Values.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{/* What every pod has, whatever runs in it. */}}
{{- define "locks-kvd.podSpec" -}}
serviceAccountName: {{ include "locks-kvd.serviceAccount" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int .Values.terminationGracePeriodSeconds }}
securityContext:
  {{- include "locks-kvd.podSecurity" . | nindent 2 }}
{{- with .Values.image.secrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  {{- include "locks-kvd.volumes" . | nindent 2 }}
{{- end -}}

{{- define "locks-kvd.spread" -}}
- topologyKey: kubernetes.io/hostname
  maxSkew: 1
  whenUnsatisfiable: {{ .Values.spread.hosts }}
  labelSelector:
    matchLabels:
      {{- include "locks-kvd.selector" . | nindent 6 }}
- topologyKey: topology.kubernetes.io/zone
  maxSkew: 1
  whenUnsatisfiable: {{ .Values.spread.zones }}
  labelSelector:
    matchLabels:
      {{- include "locks-kvd.selector" . | nindent 6 }}
{{- end -}}
