{{/* Names, labels and addresses. */}}

{{/* At most 40 characters: Kubernetes appends to it within 63. */}}
{{- define "locks-kvd.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "locks-kvd.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: daemon
{{- end -}}

{{- define "locks-kvd.labels" -}}
{{ include "locks-kvd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "locks-kvd.image" -}}
{{- if .Values.image.sha256 -}}
{{- printf "%s@sha256:%s" .Values.image.repository .Values.image.sha256 -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "locks-kvd.serviceAccount" -}}
{{- default (include "locks-kvd.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "locks-kvd.tlsSecret" -}}
{{- default (printf "%s-tls" (include "locks-kvd.fullname" .)) .Values.tls.secret -}}
{{- end -}}

{{/* Secret of one tenant's client certificate. Argument: list of root, tenant. A tenant's name may hold characters
     that an object's name must not: such a name gets a hash, so that two tenants never share a secret. */}}
{{- define "locks-kvd.clientSecret" -}}
{{- $root := index . 0 -}}
{{- $tenant := index . 1 -}}
{{- $name := $tenant | lower | replace "_" "-" | replace "." "-" | trunc 40 | trimAll "-" -}}
{{- if ne $name $tenant -}}
{{- $name = printf "%s-%s" $name ($tenant | sha256sum | trunc 8) | trimPrefix "-" -}}
{{- end -}}
{{- printf "%s-client-%s" (include "locks-kvd.fullname" $root) $name -}}
{{- end -}}

{{/* DNS suffix of the release's services: fullname-members.namespace.svc.cluster.local follows the service's name. */}}
{{- define "locks-kvd.serviceDomain" -}}
{{- printf "%s.svc.%s" .Release.Namespace .Values.clusterDomain -}}
{{- end -}}

{{- define "locks-kvd.membersHost" -}}
{{- printf "%s-members.%s" (include "locks-kvd.fullname" .) (include "locks-kvd.serviceDomain" .) -}}
{{- end -}}

{{/* Addresses that workers give to the client library, comma separated. */}}
{{- define "locks-kvd.daemons" -}}
{{- $port := int .Values.ports.control -}}
{{- $fullname := include "locks-kvd.fullname" . -}}
{{- if eq .Values.mode "pool" -}}
{{- $list := list -}}
{{- range $i := until (int .Values.replicas) -}}
{{- $list = append $list (printf "%s-%d.%s:%d" $fullname $i (include "locks-kvd.membersHost" $) $port) -}}
{{- end -}}
{{- join "," $list -}}
{{- else if eq .Values.mode "node" -}}
{{- printf "%s-local.%s:%d" $fullname (include "locks-kvd.serviceDomain" .) $port -}}
{{- else -}}
{{- printf "127.0.0.1:%d" $port -}}
{{- end -}}
{{- end -}}

{{/* "true" if an object of an API group that is not Kubernetes' own is wanted. Argument: list of root, value, API. */}}
{{- define "locks-kvd.wanted" -}}
{{- $root := index . 0 -}}
{{- $value := index . 1 -}}
{{- if eq (toString $value) "auto" -}}
{{- if $root.Capabilities.APIVersions.Has (index . 2) -}}true{{- end -}}
{{- else if $value -}}true{{- end -}}
{{- end -}}

{{/* Refuses combinations that the daemon would refuse at its start. */}}
{{- define "locks-kvd.check" -}}
{{- $least := add (int .Values.drain.timeoutSeconds) 20 -}}
{{- if lt (int .Values.terminationGracePeriodSeconds) (int $least) -}}
{{- fail (printf "terminationGracePeriodSeconds: expected at least %d (drain.timeoutSeconds + 20), got %d: raise it, or the kubelet ends a drain before its limit" $least (int .Values.terminationGracePeriodSeconds)) -}}
{{- end -}}
{{- if and (not .Values.tls.enabled) (not .Values.insecureAllow) (ne .Values.mode "sidecar") -}}
{{- fail "tls.enabled: expected true, got false: without certificates whoever reaches the control port can read every page; give certificates, or set insecureAllow if that is meant" -}}
{{- end -}}
{{- if and (eq .Values.mode "pool") .Values.cluster.enabled (not .Values.data.ucx) -}}
{{- fail "data.ucx: expected true, got false: daemons of a pool move pages over ucx; set it, or turn cluster.enabled off" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuer.name) -}}
{{- fail "tls.certManager.issuer.name: expected the name of an issuer, got nothing: name one, or make the secrets yourself and turn tls.certManager.enabled off" -}}
{{- end -}}
{{- if lt (int .Values.ports.dataLast) (int .Values.ports.dataFirst) -}}
{{- fail (printf "ports.dataLast: expected at least ports.dataFirst (%d), got %d: give the UCX data plane a range" (int .Values.ports.dataFirst) (int .Values.ports.dataLast)) -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $i, $arena := .Values.arenas -}}
{{- $name := printf "%s/%s" $arena.tenant $arena.model -}}
{{- if hasKey $seen $name -}}
{{- fail (printf "arenas[%d]: expected another tenant or model than every arena before, got %s again: merge the two" $i $name) -}}
{{- end -}}
{{- $_ := set $seen $name true -}}
{{- end -}}
{{- end -}}

{{/* What every Certificate of cert-manager has. */}}
{{- define "locks-kvd.certificateCommon" -}}
duration: {{ .Values.tls.certManager.duration }}
renewBefore: {{ .Values.tls.certManager.renewBefore }}
privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
usages: [server auth, client auth]
issuerRef:
  name: {{ .Values.tls.certManager.issuer.name | quote }}
  kind: {{ .Values.tls.certManager.issuer.kind }}
  group: {{ .Values.tls.certManager.issuer.group }}
{{- end -}}
