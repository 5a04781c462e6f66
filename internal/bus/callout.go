package bus

// CalloutConfig has a server ask identity who may log in, by the NATS auth callout. Services, the
// keeper, and identity's own two logins (subjects.Callout and subjects.Warden) are known to the server
// itself and live without identity; hosts, frontends, users and operators are let in by identity alone.
type CalloutConfig struct {
	Issuer string // public account nkey that identity signs its answers with
	XKey   string // public curve key that questions are sealed to
}
