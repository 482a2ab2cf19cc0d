{{- define "vllm-tgvkv.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "vllm-tgvkv.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "vllm-tgvkv.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
{{ include "vllm-tgvkv.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "vllm-tgvkv.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "vllm-tgvkv.claim" -}}
{{ .Values.modelStorage.existingClaim | default (printf "%s-models" (include "vllm-tgvkv.fullname" .)) }}
{{- end -}}

{{- /* GPUs of a pod. */ -}}
{{- define "vllm-tgvkv.gpus" -}}
{{- $server := .Values.server -}}
{{- $gpus := mul $server.tensorParallelSize $server.pipelineParallelSize $server.dataParallelSize -}}
{{- if mod $gpus $server.nodes -}}
{{- fail (printf "tensorParallelSize x pipelineParallelSize x dataParallelSize is %d GPUs: server.nodes (%d) has to divide it" $gpus (int $server.nodes)) -}}
{{- end -}}
{{- div $gpus $server.nodes -}}
{{- end -}}

{{- /* Seconds that a pod may take to start. */ -}}
{{- define "vllm-tgvkv.startSeconds" -}}
{{- mul .Values.probes.startup.periodSeconds .Values.probes.startup.failureThreshold -}}
{{- end -}}
