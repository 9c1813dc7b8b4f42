{{/* How much memory the pods need. The figures of the layout repeat kernels/layout.h; tests/deploy/test_chart.py holds
     them to what the daemon says. */}}

{{/* Bytes of a quantity of whole numbers: 1024, 512Mi, 4Gi. Argument: the text. */}}
{{- define "locks-kvd.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $number := regexFind "^[0-9]+" (toString .) -}}
{{- $unit := trimPrefix $number (toString .) -}}
{{- mul (int64 $number) (int64 (get $units $unit)) -}}
{{- end -}}

{{/* Slots of an arena, at most. Argument: the arena. */}}
{{- define "locks-kvd.slots" -}}
{{- $g := .geometry -}}
{{- $d := int64 $g.headDim -}}
{{- $b := int64 (default 16 $g.pageTokens) -}}
{{- $r := int64 (default 8 $g.rank) -}}
{{- $coarse := mul (div (add (div (mul 3 $d) 2) (mul 2 $b) 16 15) 16) 16 -}}
{{- $fine := mul (div (add (div (mul (sub $r 1) $d) 2) (mul (sub $r 2) (add $b 2)) 15) 16) 16 -}}
{{- $units := div (mul (int64 $g.numLayers) (int64 $g.numKvHeads)) (int64 (default 1 $g.numShards)) -}}
{{- $slot := mul $units 4 $d $b -}}
{{- $records := mul (div (add (mul $units (add $coarse $fine)) 63) 64) 64 -}}
{{- div (int64 (include "locks-kvd.bytes" .size)) (add $slot $records 64) -}}
{{- end -}}

{{/* Bytes that a daemon needs: arenas; the kernel's page tables of their mapping (8 bytes for each 4 KiB); 256 bytes a
     slot for page, lease and eviction tables; 64 MiB of staging; 2 GiB for the process, gRPC (512 MiB at most) and UCX.
     Of an arena in GPU memory: its tables alone, with 96 MiB more of staging. */}}
{{- define "locks-kvd.memoryNeeded" -}}
{{- $sum := add 67108864 2147483648 -}}
{{- range .Values.arenas -}}
{{- $bytes := int64 (include "locks-kvd.bytes" .size) -}}
{{- if hasKey . "gpu" -}}{{- $sum = add $sum 100663296 -}}{{- else -}}{{- $sum = add $sum $bytes (div $bytes 512) -}}{{- end -}}
{{- $sum = add $sum (mul 256 (int64 (include "locks-kvd.slots" .))) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/* Memory request and limit, as a quantity. */}}
{{- define "locks-kvd.memory" -}}
{{- $needed := int64 (include "locks-kvd.memoryNeeded" .) -}}
{{- $mebibytes := div (add $needed 1048575) 1048576 -}}
{{- if .Values.resources.memory -}}
{{- if lt (int64 (include "locks-kvd.bytes" .Values.resources.memory)) $needed -}}
{{- fail (printf "resources.memory: expected at least %dMi (arenas, page tables, staging and 2 GiB), got %s: raise it, leave it empty, or lower arenas[].size" $mebibytes .Values.resources.memory) -}}
{{- end -}}
{{- .Values.resources.memory -}}
{{- else -}}
{{- printf "%dMi" $mebibytes -}}
{{- end -}}
{{- end -}}
