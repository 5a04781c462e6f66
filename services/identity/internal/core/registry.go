package core

import (
	"time"

	"github.com/berth-dev/berth/schemas/ids"
)

// FrontendID names one frontend; its own name is unique only within its tenant.
type FrontendID struct {
	Tenant   ids.Tenant
	Frontend ids.Frontend
}

// Principal is one user as a tenant's issuer names it, byte for byte.
type Principal struct {
	Tenant  ids.Tenant
	Issuer  string
	Subject string
}

// TenantRules are what the registry says of a tenant.
type TenantRules struct {
	// AdminAttach lets administrators of the tenant attach to users' sessions.
	AdminAttach bool
	Suspended   bool
	Why         string
}

// LoginRules are what the registry says of a frontend.
type LoginRules struct {
	// Acting is the subject that tokens exchanged for the frontend have in act.
	Acting    string
	Suspended bool
	Why       string
}

// UserRules are of a user who is suspended.
type UserRules struct {
	Why string
	By  string // operator or administrator
}

// Claims are the claims of a verified token by name.
type Claims interface {
	// Claim is a claim that is text; false when there is none or it is no text.
	Claim(name string) (string, bool)
	// List is a claim that lists texts; nil when there is none or it is something else.
	List(name string) []string
}

// skewOf is how far the issuer's clock may differ from ours.
func (e Entry) skewOf() time.Duration {
	switch {
	case e.Tolerance == 0:
		return skew
	case e.Tolerance < 0:
		return 0
	}
	return e.Tolerance
}
