#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# deb.sh BUILD SOURCE FOLDER VERSION CXX -- makes the Debian package of a build, unpacks it, and has the consumer find
# it there; program, package and project agree on the version.
set -euo pipefail
build=$1 source=$2 folder=$3 version=$4 cxx=$5
rm -rf "$folder"
mkdir -p "$folder"
(cd "$build" && cpack -G DEB -B "$folder" >"$folder/cpack.log" 2>&1) || { cat "$folder/cpack.log"; exit 1; }
deb=$(ls "$folder"/*.deb)
[[ $(dpkg-deb -f "$deb" Version) == "$version" ]] || { dpkg-deb -f "$deb"; exit 1; }
[[ -n $(dpkg-deb -f "$deb" Depends) ]] || { echo "the package depends on nothing, not even libstdc++"; exit 1; }
dpkg-deb -x "$deb" "$folder/unpacked"
[[ $("$folder/unpacked/usr/bin/sievemla" --version) == "sievemla $version "* ]]
"$folder/unpacked/usr/bin/sievemla" verify --backend cpu >/dev/null
cmake -S "$source/consumer" -B "$folder/consumer" -DCMAKE_PREFIX_PATH="$folder/unpacked/usr" \
  -DCMAKE_CXX_COMPILER="$cxx" >/dev/null
cmake --build "$folder/consumer" >/dev/null
"$folder/consumer/consumer"
du -h "$deb"
