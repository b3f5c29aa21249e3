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

{{/* The name is fixed, because the network policies of jobs recognize the operator by it. */}}
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

{{/* Annotations of an object, given as (list $ more ...). The first ones override the others and the common ones. */}}
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

{{/* The defaults of all jobs, as JSON without empty values; empty if no default is set. */}}
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

{{/* The reference of an image, given as (list $ .Values.images.x). */}}
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
Why the chart makes no ValidatingAdmissionPolicy; empty if it makes one. Kubernetes serves the API since 1.30. `helm
template` does not know a server's APIs, so the version counts as well.
*/}}
{{- define "sluice.noAdmissionPolicy" -}}
{{- $served := .Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" }}
{{- if not .Values.admissionPolicy.enabled -}}
admissionPolicy.enabled is false
{{- else if .Values.watchNamespaces -}}
watchNamespaces is set, and a policy applies to the whole cluster
{{- else if not (or $served (semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version)) -}}
Kubernetes {{ .Capabilities.KubeVersion.Version }} does not support such policies, which need 1.30
{{- end }}
{{- end }}

{{/* CEL that is true if an expression over `c` is true for every container, given as (list SPEC EXPRESSION). */}}
{{- define "sluice.allContainers" -}}
{{- $spec := index . 0 }}
{{- $expression := index . 1 }}
{{- printf "%s.containers.all(c, %s) && (!has(%s.initContainers) || %s.initContainers.all(c, %s))" $spec $expression $spec $spec $expression }}
{{- end }}

{{/* The operator's rights on jobs, pools and their objects, in all namespaces or in each watched one. */}}
{{- define "sluice.operatorRules" -}}
- apiGroups: [sluice.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [sluice.dev]
  resources: [rlenginepools]
  verbs: [get, list, watch]
- apiGroups: [sluice.dev]
  resources: [rljobs/status, rlenginepools/status]
  verbs: [patch]
# Needed for owner references that block deletion, if OwnerReferencesPermissionEnforcement is on (OpenShift).
- apiGroups: [sluice.dev]
  resources: [rljobs/finalizers, rlenginepools/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
{{- if .Values.rbac.podLogs }}
# How far the init container `fetch` of a pod is (spec.downloads).
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
{{- end }}
# The operator tells Kueue that a group of pods has ended by an annotation or by deleting its Workload, reads from the
# Workload why a group waits, and marks pods on dead nodes as failed in their status.
- apiGroups: [""]
  resources: [pods, pods/status]
  verbs: [patch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [get, list, delete]
# Episode pods of jobs that use Sandboxes; without effect if agent-sandbox is not installed. These rights allow no more
# than pods do, because the admission policy also checks the templates of Sandboxes.
- apiGroups: [agents.x-k8s.io]
  resources: [sandboxes]
  verbs: [get, list, create, delete]
# Server-side apply needs both create and patch.
- apiGroups: [""]
  resources: [configmaps, services, persistentvolumeclaims]
  verbs: [get, create, patch]
# Engines of pools. The admission policy checks their templates as it checks pods.
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, create, patch]
# Job tokens are written and never read, so no Secret can be read with these rights.
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
# Pod groups of jobs that use Volcano or the Kubernetes scheduler; without effect if they are not installed.
- apiGroups: [scheduling.volcano.sh, scheduling.k8s.io]
  resources: [podgroups]
  verbs: [get, list, create, patch, delete]
# Locks of namespaces: if two operators watch a namespace, one of them works in it.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [rljobs.sluice.dev]
  verbs: [get, update]
# list: to read kubelets' warnings about pods that do not start.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, list]
{{- end }}

{{/* Roles for people: view, edit and repair jobs and pools. */}}
{{- define "sluice.viewerRules" -}}
- apiGroups: [sluice.dev]
  resources: [rljobs, rlenginepools]
  verbs: [get, list, watch]
- apiGroups: [sluice.dev]
  resources: [rljobs/status, rljobs/scale, rlenginepools/status, rlenginepools/scale]
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
  resources: [rljobs, rlenginepools]
  verbs: [create, update, patch, delete, deletecollection]
- apiGroups: [sluice.dev]
  resources: [rljobs/scale, rlenginepools/scale]
  verbs: [update, patch]
{{- end }}

{{- define "sluice.adminRules" -}}
{{ include "sluice.editorRules" . }}
- apiGroups: [sluice.dev]
  resources: [rljobs/status, rlenginepools/status]
  verbs: [update, patch]
{{- end }}
