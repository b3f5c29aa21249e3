"""Memory of GPU and host: staging, offloading, headroom."""
