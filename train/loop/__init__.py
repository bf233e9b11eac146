"""A run from its checks to its export: opened, recorded, built and restored, fitted with what is due between steps."""
