{{/* The daemon's configuration: proto/config.proto in JSON form. What differs between pods is a flag or comes from the
     pod's environment (_pod.tpl). */}}
{{- define "locks-kvd.config" -}}
{{- $control := dict -}}
{{- if eq .Values.mode "sidecar" -}}
{{- $_ := set $control "address" (printf "127.0.0.1:%d" (int .Values.ports.control)) -}}
{{- else -}}
{{- $_ := set $control "address" (printf "0.0.0.0:%d" (int .Values.ports.control)) -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $control "tls" (dict "certificateFile" "/etc/locks-kvd/tls/tls.crt" "keyFile" "/etc/locks-kvd/tls/tls.key" "caFile" "/etc/locks-kvd/tls/ca.crt") -}}
{{- else if .Values.insecureAllow -}}
{{- $_ := set $control "insecureAllow" true -}}
{{- end -}}
{{- $data := dict "ucx" .Values.data.ucx "ucxPortRange" (printf "%d-%d" (int .Values.ports.dataFirst) (int .Values.ports.dataLast)) -}}
{{- if .Values.data.devices -}}{{- $_ := set $data "ucxDevices" .Values.data.devices -}}{{- end -}}
{{- if .Values.data.transports -}}{{- $_ := set $data "ucxTransports" .Values.data.transports -}}{{- end -}}
{{- if ne .Values.mode "pool" -}}{{- $_ := set $data "socketDir" (include "locks-kvd.socketDir" .) -}}{{- end -}}
{{- $arenas := list -}}
{{- range $i, $value := .Values.arenas -}}
{{- $arena := dict "tenant" $value.tenant "model" $value.model "geometry" $value.geometry "identity" $value.identity "bytes" (include "locks-kvd.bytes" $value.size) -}}
{{- if hasKey $value "gpu" -}}{{- $_ := set $arena "gpu" (int $value.gpu) -}}{{- end -}}
{{- if $value.encoder -}}{{- $_ := set $arena "encoder" $value.encoder -}}{{- end -}}
{{- if $value.queryMetric -}}{{- $_ := set $arena "queryMetricFile" (printf "/etc/locks-kvd/query-metric/%d/%s" $i $value.queryMetric.key) -}}{{- end -}}
{{- $arenas = append $arenas $arena -}}
{{- end -}}
{{- $config := dict "control" $control "healthAddress" (printf "0.0.0.0:%d" (int .Values.ports.health)) "metricsAddress" (printf "0.0.0.0:%d" (int .Values.ports.metrics)) "data" $data "arenas" $arenas "log" .Values.log -}}
{{- $_ := set $config "times" (merge (dict "drainMs" (mul 1000 (int .Values.drain.timeoutSeconds))) .Values.times) -}}
{{- if .Values.limits -}}{{- $_ := set $config "limits" .Values.limits -}}{{- end -}}
{{- if and (eq .Values.mode "pool") .Values.cluster.enabled -}}
{{- $cluster := dict "membersDns" (printf "_control._tcp.%s" (include "locks-kvd.membersHost" .)) "replicas" .Values.cluster.copies -}}
{{- if not .Values.cluster.rebalance -}}{{- $_ := set $cluster "noRebalance" true -}}{{- end -}}
{{- with .Values.cluster.moveBytesPerSecond -}}{{- $_ := set $cluster "moveBytesPerSecond" (toString (int64 .)) -}}{{- end -}}
{{- if .Values.cluster.nccl -}}{{- $_ := set $cluster "nccl" dict -}}{{- end -}}
{{- $_ := set $config "cluster" $cluster -}}
{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}

{{/* Where daemon and workers of a host meet. In the sidecar's emptyDir the daemon makes a directory of its own: an
     emptyDir itself is open to every user of the pod. */}}
{{- define "locks-kvd.socketDir" -}}
{{- if eq .Values.mode "sidecar" -}}/run/locks-kvd/socket{{- else -}}/run/locks-kvd{{- end -}}
{{- end -}}
