{{/* At most 50 characters: suffixes such as -watched-namespaces must fit into 63. */}}
{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* The name is fixed: by it the network policies of jobs know the operator. */}}
{{- define "sluice.selectorLabels" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "sluice.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "sluice.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Annotations of an object; give (list $ more ...), of which the first goes over the others and over the common ones. */}}
{{- define "sluice.annotations" -}}
{{- $all := dict }}
{{- range concat (rest .) (list (first .).Values.commonAnnotations) }}
{{- $all = merge $all (deepCopy (default dict .)) }}
{{- end }}
{{- with $all }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "sluice.serviceAccountName" -}}
{{- default (ternary (include "sluice.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "sluice.leaseName" -}}
{{- default (include "sluice.fullname" .) .Values.lease.name }}
{{- end }}

{{- define "sluice.keySecretName" -}}
{{- default (printf "%s-key" (include "sluice.fullname" .)) .Values.keySecret.name }}
{{- end }}

{{/* The defaults of all jobs, as JSON, without what is empty; nothing where nothing is set. */}}
{{- define "sluice.jobDefaults" -}}
{{- $found := dict }}
{{- range $name, $value := .Values.jobDefaults }}
{{- if kindIs "map" $value }}
{{- $inner := dict }}
{{- range $key, $each := $value }}
{{- if $each }}{{ $_ := set $inner $key $each }}{{ end }}
{{- end }}
{{- $value = $inner }}
{{- if eq $name "nodeSelector" }}{{ $value = index $.Values.jobDefaults $name }}{{ end }}
{{- end }}
{{- if $value }}{{ $_ := set $found $name $value }}{{ end }}
{{- end }}
{{- if $found }}{{ $found | toPrettyJson }}{{ end }}
{{- end }}

{{/* An image's reference; give (list $ .Values.images.x). */}}
{{- define "sluice.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 1 }}
{{- $name := printf "%s/%s" ($root.Values.images.registry | default $image.registry | trimSuffix "/") $image.repository }}
{{- if $image.digest }}
{{- printf "%s@%s" $name $image.digest }}
{{- else }}
{{- printf "%s:%s" $name ($image.tag | default $root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/*
Why the chart makes no ValidatingAdmissionPolicy; empty: it makes one. Kubernetes serves the API from 1.30 on. `helm
template` knows no server's APIs, so the version counts too.
*/}}
{{- define "sluice.noAdmissionPolicy" -}}
{{- $served := .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" }}
{{- if not .Values.admissionPolicy.enabled -}}
admissionPolicy.enabled is false
{{- else if .Values.watchNamespaces -}}
watchNamespaces is set, and a policy is of the whole cluster
{{- else if not (or $served (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version)) -}}
Kubernetes {{ .Capabilities.KubeVersion.Version }} has no such policies, which came with 1.30
{{- end }}
{{- end }}

{{/* CEL that holds if an expression over `c` does for every container; give (list SPEC EXPRESSION). */}}
{{- define "sluice.allContainers" -}}
{{- $spec := index . 0 }}
{{- $expression := index . 1 }}
{{- printf "%s.containers.all(c, %s) && (!has(%s.initContainers) || %s.initContainers.all(c, %s))" $spec $expression $spec $spec $expression }}
{{- end }}

{{/* What the operator does to jobs and to what they own, in all namespaces or in each watched one. */}}
{{- define "sluice.operatorRules" -}}
- apiGroups: [sluice.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [sluice.dev]
  resources: [rljobs/status]
  verbs: [patch]
# Owner references that block an owner's deletion need this where OwnerReferencesPermissionEnforcement is on (OpenShift).
- apiGroups: [sluice.dev]
  resources: [rljobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
# Kueue is told that a group of pods has ended by an annotation, or by the deletion of its Workload, which also says why
# the group waits; and that a pod on a dead node has failed, by its status.
- apiGroups: [""]
  resources: [pods, pods/status]
  verbs: [patch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, delete]
# Pods of episodes, for jobs that have Sandboxes make them; of no effect where agent-sandbox is not installed. No more
# than a pod may do: the policy of admission bounds their templates too.
- apiGroups: [agents.x-k8s.io]
  resources: [sandboxes]
  verbs: [get, list, create, delete]
# Server-side apply asks for both create and patch.
- apiGroups: [""]
  resources: [configmaps, services, persistentvolumeclaims]
  verbs: [get, create, patch]
# Job tokens are written and never read: no Secret of anybody can be seen with these rights.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch, delete]
# GPUs that trainer and engines share (trainer.colocate).
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [get, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch, delete]
# Gangs, for jobs that ask for Volcano or for the scheduler's own; of no effect where these are not installed.
- apiGroups: [scheduling.volcano.sh, scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, create, patch, delete]
# Whose a namespace is: of two operators that watch it, one works.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [rljobs.sluice.dev]
  verbs: [get, update]
# list: what kubelets warn of pods that do not start.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, list]
{{- end }}

{{/* What people do: look at jobs, change them, mend them. */}}
{{- define "sluice.viewerRules" -}}
- apiGroups: [sluice.dev]
  resources: [rljobs]
  verbs: [get, list, watch]
- apiGroups: [sluice.dev]
  resources: [rljobs/status, rljobs/scale]
  verbs: [get]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: ["", events.k8s.io]
  resources: [events]
  verbs: [get, list, watch]
{{- end }}

{{- define "sluice.editorRules" -}}
{{ include "sluice.viewerRules" . }}
- apiGroups: [sluice.dev]
  resources: [rljobs]
  verbs: [create, update, patch, delete, deletecollection]
- apiGroups: [sluice.dev]
  resources: [rljobs/scale]
  verbs: [update, patch]
{{- end }}

{{- define "sluice.adminRules" -}}
{{ include "sluice.editorRules" . }}
- apiGroups: [sluice.dev]
  resources: [rljobs/status]
  verbs: [update, patch]
{{- end }}
