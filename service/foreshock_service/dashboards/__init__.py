"""Brings the shipped Grafana boards into a Grafana: folder, data sources, boards, annotations."""
