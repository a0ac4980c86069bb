"""Sparse MLPs: routers, routed experts and shared experts."""
