// Package scope names the policies of a cell in the bucket that holds them. It guarantees that two scopes have
// two keys, that a key leads back to its scope, and that a session's scopes follow from its binding alone.
package scope

import (
	"errors"
	"fmt"
	"strings"

	egressv1 "github.com/berth-dev/berth/schemas/gen/berth/egress/v1"
	"github.com/berth-dev/berth/schemas/ids"
)

// Bucket holds one record per scope: the wire form of egressv1.Policy, whose generation is its revision.
const Bucket = "BERTH_EGRESS"

// Key is where a scope's policy is; an error says what is wrong with the scope.
func Key(s *egressv1.Scope) (string, error) {
	if s == nil {
		return "", errors.New("a policy needs a scope")
	}
	if l := s.GetLayer(); l != egressv1.Layer_LAYER_SESSION && s.GetTenant() != "" {
		return "", errors.New("only the scope of a session names a tenant besides")
	}
	switch s.GetLayer() {
	case egressv1.Layer_LAYER_CELL:
		if s.GetName() != "" {
			return "", errors.New("the scope of the cell has no name")
		}
		return "cell", nil
	case egressv1.Layer_LAYER_PLAN:
		return named("plan", s.GetName(), token)
	case egressv1.Layer_LAYER_TEMPLATE:
		return named("template", s.GetName(), token)
	case egressv1.Layer_LAYER_TENANT:
		return named("tenant", s.GetName(), tenant)
	case egressv1.Layer_LAYER_SESSION:
		if err := tenant(s.GetTenant()); err != nil {
			return "", fmt.Errorf("the scope of a session needs its tenant: %w", err)
		}
		return named("session."+s.GetTenant(), s.GetName(), session)
	}
	return "", errors.New("the scope is of no layer: cell, plan, tenant, template and session are known")
}

func named(prefix, name string, check func(string) error) (string, error) {
	if err := check(name); err != nil {
		return "", err
	}
	return prefix + "." + name, nil
}

func token(s string) error   { _, err := ids.ParseTemplate(s); return err }
func tenant(s string) error  { _, err := ids.ParseTenant(s); return err }
func session(s string) error { _, err := ids.ParseSessionKey(s); return err }

// Parse is the scope of a key.
func Parse(key string) (*egressv1.Scope, error) {
	parts := strings.Split(key, ".")
	s := &egressv1.Scope{}
	switch layer := parts[0]; {
	case layer == "cell" && len(parts) == 1:
		s.Layer = egressv1.Layer_LAYER_CELL
	case layer == "session" && len(parts) == 3:
		s.Layer, s.Tenant, s.Name = egressv1.Layer_LAYER_SESSION, parts[1], parts[2]
	case len(parts) == 2:
		s.Layer, s.Name = egressv1.Layer(egressv1.Layer_value["LAYER_"+strings.ToUpper(layer)]), parts[1]
	}
	if again, err := Key(s); err != nil || again != key {
		return nil, fmt.Errorf("%q is the key of no scope", key)
	}
	return s, nil
}

// Of are the keys of the scopes that concern a session.
func Of(b *egressv1.Binding) [5]string {
	t := b.GetSession().GetTenant()
	return [5]string{"session." + t + "." + b.GetSession().GetSession(), "template." + b.GetTemplate(), "tenant." + t, "plan." + b.GetPlan(), "cell"}
}
