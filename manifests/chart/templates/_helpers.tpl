{{- /* Conditions are texts: "true" or nothing. */ -}}

{{- define "warmpath.standalone" -}}
{{- if eq .Values.gateway.type "standalone" }}true{{ end -}}
{{- end }}

{{- /* Envoys that show requests only, and speak to the picker in plaintext. */ -}}
{{- define "warmpath.lean" -}}
{{- if has .Values.gateway.type (list "envoy-gateway" "standalone") }}true{{ end -}}
{{- end }}

{{- define "warmpath.kvEvents" -}}
{{- if eq .Values.strategy "kv-aware" }}true{{ end -}}
{{- end }}

{{- define "warmpath.l1" -}}
{{- if gt (int .Values.tiers.l1GiB) 0 }}true{{ end -}}
{{- end }}

{{- define "warmpath.l2" -}}
{{- if or (gt (int .Values.tiers.l2GiB) 0) .Values.tiers.l2Adapter }}true{{ end -}}
{{- end }}

{{- define "warmpath.roles" -}}
{{- if gt (int (add .Values.roles.prefill .Values.roles.decode)) 0 }}true{{ end -}}
{{- end }}

{{- define "warmpath.several" -}}
{{- if gt (int .Values.picker.replicas) 1 }}true{{ end -}}
{{- end }}

{{- define "warmpath.pickersScaled" -}}
{{- if gt (int .Values.autoscaling.pickers) 0 }}true{{ end -}}
{{- end }}

{{- define "warmpath.serversScaled" -}}
{{- if gt (int .Values.autoscaling.servers) 0 }}true{{ end -}}
{{- end }}

{{- define "warmpath.className" -}}
{{- $usual := dict "envoy-gateway" "eg" "envoy-ai-gateway" "eg" "istio" "istio" "agentgateway" "agentgateway" "gke" "gke-l7-regional-external-managed" -}}
{{- .Values.gateway.className | default (get $usual .Values.gateway.type) -}}
{{- end }}

{{- /* Release names may differ and namespaces must: what belongs to no namespace is named for the one it serves. */ -}}
{{- define "warmpath.clusterName" -}}
{{- printf "%s-%s" .name .root.Release.Namespace -}}
{{- end }}

{{- /* The picker's configuration. */ -}}
{{- define "warmpath.config" -}}
{{- if .Values.picker.config -}}
{{- .Values.picker.config -}}
{{- else if and (include "warmpath.kvEvents" .) (include "warmpath.l1" .) -}}
{{- .Files.Get "files/kv-aware-tiers.yaml" -}}
{{- else -}}
{{- .Files.Get (printf "files/%s.yaml" .Values.strategy) -}}
{{- end -}}
{{- end }}

{{- /* Whom NetworkPolicies take for the gateway. */ -}}
{{- define "warmpath.gateways" -}}
{{- if hasPrefix "envoy-" .Values.gateway.type -}}
# Envoy Gateway has its Envoys in its own namespace, as its chart has it.
- namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: envoy-gateway-system}}
  podSelector: {matchLabels: {gateway.envoyproxy.io/owning-gateway-name: inference}}
{{- else if eq .Values.gateway.type "gke" -}}
{{- range .Values.gateway.proxyRanges }}
- ipBlock: {cidr: {{ quote . }}}
{{- end }}
# Google's health checks.
- ipBlock: {cidr: 35.191.0.0/16}
- ipBlock: {cidr: 130.211.0.0/22}
{{- else -}}
# The label of Gateway API on the pods that controllers make for the Gateway, of this namespace only: whoever may make pods
# in another one could label them so.
- podSelector: {matchLabels: {gateway.networking.k8s.io/gateway-name: inference}}
{{- end }}
{{- end }}

{{- /* What vLLM and the simulator publish their KV events by. */ -}}
{{- define "warmpath.kvEventsFlag" -}}
--kv-events-config={"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}
{{- end }}

{{- /* Of pods that need no rights. */ -}}
{{- define "warmpath.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}
