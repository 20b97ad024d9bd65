#!/bin/bash
# Two hosts on one machine: network namespaces host1 and host2, joined by a virtual cable. Needs root.
#
#   source benchmarks/two_hosts.sh          # makes on_host and the cable; `two_hosts_down` removes them
#   on_host 1 COMMAND & on_host 2 COMMAND
#   ip -n host1 link set cable down         # host 1 is lost: no packet arrives, no connection closes

two_hosts_up() {
    for i in 1 2; do
        ip netns add host$i
        ip -n host$i link set lo up
        mkdir -p /etc/netns/host$i
        printf '127.0.0.1 localhost\n10.77.0.1 host1\n10.77.0.2 host2\n' >/etc/netns/host$i/hosts
    done
    ip link add cable netns host1 type veth peer name cable netns host2
    for i in 1 2; do
        ip -n host$i address add 10.77.0.$i/24 dev cable
        ip -n host$i link set cable up
    done
}

two_hosts_down() {
    ip netns delete host1
    ip netns delete host2
    rm -r /etc/netns/host1 /etc/netns/host2
}

on_host() {  # HOST COMMAND...: with the host's network and its name
    local host=$1
    shift
    ip netns exec host$host unshare --uts sh -c 'hostname "$0" && exec "$@"' host$host "$@"
}
