{{- /*
Template of a pod: a list of the chart's scope and "server", or "worker" for a pod of a group that
computes and does not serve; and, with `handover`, "prefill" or "decode".
*/ -}}
{{- define "vllm-tgvkv.pod" -}}
{{- $role := index . 1 -}}
{{- $scope := first . -}}
{{- $side := "" -}}
{{- if gt (len .) 2 }}{{ $side = last . }}{{ end -}}
{{- with $scope -}}
{{- $gpus := dict .Values.gpuResource (include "vllm-tgvkv.gpus" . | int) -}}
{{- $isServer := eq $role "server" -}}
{{- $isGroup := gt (int .Values.server.nodes) 1 -}}
metadata:
  labels:
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "vllm-tgvkv.labels" . | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
    {{- with $side }}
    vllm-tgvkv/handover: {{ . }}
    {{- end }}
  annotations:
    # Pods are replaced when their configuration changes.
    checksum/config: {{ .Values.server.configYaml | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  # The server does not talk to Kubernetes; variables of other Services named vllm-* would be
  # taken for settings of vLLM.
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  # The pause below, the requests' time, and some to end.
  terminationGracePeriodSeconds: {{ add .Values.server.shutdownTimeout 40 }}
  containers:
    - name: server
      image: {{ include "vllm-tgvkv.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - --config
        {{- if .Values.server.configYaml }}
        - /etc/vllm/config.yaml
        {{- else }}
        - /configs/{{ .Values.server.config }}.yaml
        {{- end }}
        - --tensor-parallel-size={{ .Values.server.tensorParallelSize }}
        - --pipeline-parallel-size={{ .Values.server.pipelineParallelSize }}
        - --data-parallel-size={{ .Values.server.dataParallelSize }}
        {{- if $isGroup }}
        - --nnodes={{ .Values.server.nodes }}
        - --node-rank=$(NODE_RANK)
        - --master-addr={{ ternary "$(VLLM_HOST_IP)" "$(LWS_LEADER_ADDRESS)" $isServer }}
        {{- end }}
        {{- if $isServer }}
        - --host=0.0.0.0
        - --port=8000
        - --shutdown-timeout={{ .Values.server.shutdownTimeout }}
        {{- with .Values.server.apiServerCount }}
        - --api-server-count={{ . }}
        {{- end }}
        {{- else }}
        - --headless
        {{- end }}
        {{- if $side }}
        {{- $transfer := dict "kv_connector" "NixlConnector" "kv_role" (get .Values.handover $side).role }}
        {{- $_ := set $transfer "kv_connector_extra_config" (dict "kv_lease_duration" (int .Values.handover.leaseSeconds)) }}
        {{- /* Of prompts that travel whole; cut ones are always computed again. */}}
        {{- $_ := set $transfer "kv_load_failure_policy" "recompute" }}
        - {{ printf "--kv-transfer-config=%s" (toJson $transfer) | quote }}
        {{- end }}
        {{- range .Values.server.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- if $isGroup }}
        # The controller adds LWS_LEADER_ADDRESS. It is a name, and the leader itself listens on an address.
        - name: NODE_RANK
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
        - name: VLLM_HOST_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- end }}
        {{- if $side }}
        # Bound to, so no name.
        - name: VLLM_NIXL_SIDE_CHANNEL_HOST
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: VLLM_NIXL_SIDE_CHANNEL_PORT
          value: {{ .Values.handover.sideChannelPort | quote }}
        {{- end }}
        {{- with .Values.apiKey }}
        {{- if and .secretName $isServer }}
        - name: VLLM_API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ .secretName }}
              key: {{ .secretKey }}
        {{- end }}
        {{- end }}
        {{- with .Values.huggingFaceToken }}
        {{- if .secretName }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ .secretName }}
              key: {{ .secretKey }}
        {{- end }}
        {{- end }}
        {{- with .Values.server.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if $isServer }}
      ports:
        - name: http
          containerPort: 8000
      {{- range $kind := list "startup" "readiness" "liveness" }}
      {{ $kind }}Probe:
        httpGet:
          path: /health
          port: http
        {{- toYaml (get $scope.Values.probes $kind) | nindent 8 }}
      {{- end }}
      {{- end }}
      lifecycle:
        preStop:
          exec:
            {{- if $isServer }}
            # No request comes any more when the server is told to end.
            command: ["sleep", "10"]
            {{- else }}
            # The server's last requests still need this pod.
            command: ["sleep", "{{ add .Values.server.shutdownTimeout 10 }}"]
            {{- end }}
      resources:
        requests:
          {{- toYaml (merge (dict) .Values.resources.requests $gpus) | nindent 10 }}
        limits:
          {{- toYaml (merge (dict) .Values.resources.limits $gpus) | nindent 10 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        - name: models
          mountPath: /models
        - name: cache
          mountPath: /cache
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
        {{- if .Values.server.configYaml }}
        - name: config
          mountPath: /etc/vllm
          readOnly: true
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: models
      {{- if .Values.modelStorage.enabled }}
      persistentVolumeClaim:
        claimName: {{ include "vllm-tgvkv.claim" . }}
      {{- else }}
      emptyDir:
        sizeLimit: {{ .Values.modelStorage.size }}
      {{- end }}
    - name: cache
      emptyDir:
        sizeLimit: {{ .Values.cacheSizeLimit }}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.shmSize }}
    {{- if .Values.server.configYaml }}
    - name: config
      configMap:
        name: {{ include "vllm-tgvkv.fullname" . }}
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}
