from gem_core.testing import conformance_suite

TestAcmeGdpa = conformance_suite("gdpa", backend="acme")
