#!/usr/bin/env bash
# A kind cluster with sluice on it, for machines that have docker, kind, kubectl and helm.
#
#   tests/kind/kind.sh up       cluster, images, chart
#   tests/kind/kind.sh test     the cluster tests, then the chart's own test and the quickstart in pods
#   tests/kind/kind.sh down     delete the cluster
#
# CLUSTER (sluice) names it; IMAGES=built takes images that are there already; kubectl's own configuration is left alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
CLUSTER=${CLUSTER:-sluice}
REGISTRY=${REGISTRY:-ghcr.io/sluice-dev}
TAG=${TAG:-0.1.0}
PYTHON=${PYTHON:-.venv/bin/python}
NAMESPACE=sluice-system
JOBS=quickstart
export KUBECONFIG="$PWD/runs/kind/kubeconfig"

main() {
    case "${1:-}" in
        up) needs docker kind kubectl helm; cluster; images; install ;;
        test) needs docker kind kubectl helm; cluster; cluster_tests; images; install; pods ;;
        down) needs kind; kind delete cluster --name "$CLUSTER" ;;
        *) echo "usage: $0 up|test|down" >&2; exit 2 ;;
    esac
}

needs() {
    for program in "$@"; do
        command -v "$program" >/dev/null || { echo "error: $0 needs $program on the PATH" >&2; exit 2; }
    done
}

cluster() {
    mkdir -p "$(dirname "$KUBECONFIG")"
    if kind get clusters | grep --quiet --line-regexp "$CLUSTER"; then
        kind export kubeconfig --name "$CLUSTER"
    else
        kind create cluster --name "$CLUSTER" --config tests/kind/cluster.yaml --wait 3m
    fi
}

# What the chart with tests/kind/values.yaml runs: each image is built, and brought into the node, once.
images() {
    local image
    for image in operator buffer cpu; do
        if [ "${IMAGES:-}" != built ]; then
            docker build --file docker/Dockerfile --target "$image" --tag "$REGISTRY/sluice-$image:$TAG" .
        fi
        kind load docker-image "$REGISTRY/sluice-$image:$TAG" --name "$CLUSTER"
    done
}

install() {
    helm upgrade sluice charts/sluice --install --namespace "$NAMESPACE" --create-namespace \
        --values tests/kind/values.yaml --wait --timeout 5m
}

# They stand in for the kubelet, which therefore gets no pods; and start operators of their own.
cluster_tests() {
    helm uninstall sluice --namespace "$NAMESPACE" --ignore-not-found --wait
    kubectl cordon --selector kubernetes.io/os=linux
    SLUICE_TESTS_MUST_RUN=1 "$PYTHON" -m pytest tests/cluster -m cluster || { uncordon; exit 1; }
    uncordon
}

uncordon() {
    kubectl uncordon --selector kubernetes.io/os=linux
}

# The example as docs/install.md tells it, in a namespace that enforces the restricted standard.
pods() {
    helm test sluice --namespace "$NAMESPACE" --timeout 3m
    kubectl create namespace "$JOBS" --dry-run=client --output yaml | kubectl apply --filename -
    kubectl label namespace "$JOBS" --overwrite pod-security.kubernetes.io/enforce=restricted
    kubectl --namespace "$JOBS" delete rljob quickstart --ignore-not-found
    kubectl --namespace "$JOBS" delete pod data --ignore-not-found
    sed "s|IMAGE|$REGISTRY/sluice-cpu:$TAG|" tests/kind/data.yaml | kubectl --namespace "$JOBS" apply --filename -
    kubectl --namespace "$JOBS" wait --for=condition=Ready --timeout=3m pod/data
    mkdir -p runs/kind/quickstart
    "$PYTHON" examples/quickstart/make_data.py runs/kind/quickstart
    cp examples/quickstart/reward.py runs/kind/quickstart/
    kubectl --namespace "$JOBS" cp runs/kind/quickstart/. data:/volume
    kubectl --namespace "$JOBS" delete pod data
    kubectl --namespace "$JOBS" apply --filename examples/kubernetes/quickstart.yaml
    kubectl --namespace "$JOBS" wait --for=condition=Succeeded --timeout=30m rljob/quickstart
}

main "$@"
