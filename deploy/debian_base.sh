#!/usr/bin/env bash
# Makes the folder $1 a Debian with Python 3.11, stripped as slim images are: what images are built on
# where no registry of images can be reached (make images BASE=folder). As root; needs debootstrap.
set -euo pipefail
root=${1:?a folder}
debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates bookworm "$root"
# This machine's authorities, for a proxy that it knows.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
cd "$root"
find usr/share/{doc,info,lintian,man} -mindepth 1 ! -type d ! -name copyright -delete 2>/dev/null || true
find usr/share/locale -mindepth 1 -maxdepth 1 ! -name locale.alias -exec rm -rf {} +
find usr -name __pycache__ -prune -exec rm -rf {} +
rm -rf var/lib/apt/lists/* var/cache/apt/* var/cache/debconf/*-old var/log/*
du -sm .
