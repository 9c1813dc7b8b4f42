{{/* One `helm test` pod. Argument: dict of root, name, script (bash), certificate (mount the client's certificate). */}}
{{- define "locks-kvd.testPod" -}}
{{- $root := .root -}}
{{- $arena := first $root.Values.arenas -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ include "locks-kvd.fullname" $root }}-test-{{ .name }}
  labels:
    app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
    app.kubernetes.io/instance: {{ $root.Release.Name }}
    app.kubernetes.io/component: test
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext: {runAsNonRoot: true, runAsUser: 65532, runAsGroup: 65532, fsGroup: 65532, seccompProfile: {type: RuntimeDefault}}
  {{- with $root.Values.image.secrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  containers:
    - name: test
      image: {{ include "locks-kvd.image" $root | quote }}
      imagePullPolicy: {{ $root.Values.image.policy }}
      command: [bash, -euo, pipefail, -c]
      args:
        - |
          {{- .script | trim | nindent 10 }}
      env:
        - {name: LOCKSCTL_DAEMONS, value: {{ include "locks-kvd.daemons" $root | quote }}}
        - {name: TENANT, value: {{ $arena.tenant | quote }}}
        - {name: MODEL, value: {{ $arena.model | quote }}}
        - {name: WEIGHTS_ID, value: {{ $arena.identity.weightsId | quote }}}
        - {name: ROPE, value: {{ default "" $arena.identity.rope | quote }}}
      resources: {requests: {cpu: 100m, memory: 512Mi}, limits: {memory: 512Mi}}
      securityContext:
        {{- include "locks-kvd.plainSecurity" $root | nindent 8 }}
      {{- if .certificate }}
      volumeMounts: [{name: tls, mountPath: /etc/locks-kvd/tls, readOnly: true}]
  volumes:
    - name: tls
      secret: {secretName: {{ default (include "locks-kvd.clientSecret" (list $root $arena.tenant)) $root.Values.tests.clientSecret }}, defaultMode: 0440}
      {{- end }}
{{- end -}}

{{/* Flags of locksctl that present the client's certificate. */}}
{{- define "locks-kvd.testTls" -}}
{{- if .Values.tls.enabled -}}
--ca /etc/locks-kvd/tls/ca.crt --cert /etc/locks-kvd/tls/tls.crt --key /etc/locks-kvd/tls/tls.key
{{- end -}}
{{- end -}}
