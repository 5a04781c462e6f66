// Package egress shows what leaves a sandbox and what does not: each way round an egress policy that is known
// is a named test, tried from inside real sandboxes of every tier with a network, over IPv4 and IPv6, against
// servers of the test's own on loopback addresses, which count what reaches them. Real clients show that what
// a policy allows works.
package egress
