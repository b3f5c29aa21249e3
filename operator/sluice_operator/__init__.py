"""RLJob -> pods: a pure planner, a reconciler, and the clusters that it runs on."""
