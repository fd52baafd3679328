#!/bin/sh
# Makes a certificate authority and the certificate of the job store, for 825 days:
#     sh make_certificates.sh FOLDER redis.example.org 10.0.0.5
# FOLDER gets ca.crt (for every host: KD_REDIS_CA_FILE), server.crt and server.key (for the job store), ca.key (keep it).
set -eu
umask 077
folder=$1
shift
names=
for name in "$@"; do
  case "$name" in
    *[!0-9.]*) names="$names,DNS:$name" ;;
    *) names="$names,IP:$name" ;;
  esac
done
mkdir -p "$folder"
cd "$folder"
openssl req -x509 -newkey rsa:2048 -nodes -days 825 -subj "/CN=potstill job store CA" -keyout ca.key -out ca.crt
openssl req -newkey rsa:2048 -nodes -subj "/CN=$1" -keyout server.key -out server.csr
printf 'subjectAltName=%s\n' "${names#,}" >names.txt
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 825 -extfile names.txt -out server.crt
rm server.csr names.txt ca.srl
