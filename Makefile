PY := .venv/bin/python
.PHONY: protos
protos:
	rm -rf sluice/wire/v1 && mkdir -p sluice/wire/v1
	$(PY) -m grpc_tools.protoc -I protos --python_out=sluice/wire --pyi_out=sluice/wire --grpc_python_out=sluice/wire protos/sluice/v1/*.proto
	mv sluice/wire/sluice/v1/* sluice/wire/v1/ && rm -r sluice/wire/sluice
	sed -i 's/^from sluice\.v1 import/from sluice.wire.v1 import/' sluice/wire/v1/*.py sluice/wire/v1/*.pyi
	echo '"""Generated from protos/sluice/v1 by make protos."""' > sluice/wire/v1/__init__.py
