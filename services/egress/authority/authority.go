// Package authority has the one form of a destination that Berth compares: of a policy's rule, a DNS
// question, CONNECT, SOCKS5, SNI, a certificate, the Host field and what is dialled. It guarantees that two
// spellings of one host have one Name, that what is no host name for certain is refused and never
// repaired, and that the Name which was judged is the very text that is looked up and dialled.
package authority

// Name is a canonical host name: lower-case ASCII, A-labels (xn--) where there are others, no dot at the
// end, at least two labels, no address in any spelling. Only Parse makes one.
type Name string
