package tierpolicy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"unicode"

	corev1 "github.com/berth-dev/berth/schemas/gen/berth/core/v1"
	"github.com/berth-dev/berth/services/lifecycle/internal/core"
	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	"github.com/google/cel-go/common/types"
	"gopkg.in/yaml.v3"
)

// Bounds of one expression.
const (
	maxExpression = 2048
	maxDepth      = 32
	// maxCost is in CEL's units, about one step each: a rule of the default policy takes at most 13.
	maxCost = 2000
)

// Facts that a rule may look at; see docs/howto/tier-policy.md.
var declared = []cel.EnvOption{
	cel.Variable("request.code_author", cel.StringType),
	cel.Variable("request.tools", cel.StringType),
	cel.Variable("request.data_class", cel.StringType),
	cel.Variable("request.network", cel.StringType),
	cel.Variable("request.tool_access", cel.BoolType),
	cel.Variable("request.min_tier", cel.StringType),
	cel.Variable("request.template", cel.StringType),
	cel.Variable("request.template_tier", cel.StringType),
	cel.Variable("request.persistence", cel.StringType),
	cel.Variable("tenant.name", cel.StringType),
	cel.Variable("tenant.plan", cel.StringType),
	cel.Variable("tenant.floor", cel.StringType),
	cel.Variable("fleet.known", cel.BoolType),
	cel.Variable("fleet.tiers", cel.ListType(cel.StringType)),
	cel.Variable("fleet.accel", cel.MapType(cel.StringType, cel.StringType)),
	cel.Variable("fleet.not_held", cel.MapType(cel.StringType, cel.ListType(cel.StringType))),
	cel.Variable("classes", cel.MapType(cel.StringType, cel.IntType)),
	cel.ParserRecursionLimit(maxDepth),
	cel.ParserExpressionSizeLimit(maxExpression),
}

// environment is CEL's standard library, which has no function that does I/O or
// reads a clock, and the facts.
var environment = sync.OnceValues(func() (*cel.Env, error) {
	return cel.NewCustomEnv(append([]cel.EnvOption{cel.StdLib()}, declared...)...)
})

// tierNames are the keys of fleet.accel and fleet.not_held: all of them are always there.
var tierNames = []string{"container", "gvisor", "kata", "microvm", "wasm"}

// program is one expression, ready to be asked.
type program struct{ cel.Program }

// compile checks one expression; n is where it is written.
func (p *Policy) compile(n node, when string) (program, error) {
	env, err := environment()
	if err != nil {
		return program{}, n.fail("%v", err)
	}
	if len(when) > maxExpression {
		return program{}, n.fail("the expression has %d bytes, at most %d are allowed", len(when), maxExpression)
	}
	checked, issues := env.Compile(when)
	if issues.Err() != nil {
		return program{}, whereIn(n, when, issues)
	}
	if checked.OutputType() != cel.BoolType {
		return program{}, n.fail("the expression gives %s; a rule needs true or false", checked.OutputType())
	}
	if err := p.checkWords(n, checked.NativeRep().Expr()); err != nil {
		return program{}, err
	}
	prog, err := env.Program(checked, cel.CostLimit(maxCost), cel.EvalOptions(cel.OptOptimize))
	if err != nil {
		return program{}, n.fail("%s", oneLine(err.Error()))
	}
	return program{prog}, nil
}

// whereIn says the first thing that is wrong with an expression, with the line of the file where it
// can be known, and the name that nothing bears.
func whereIn(n node, when string, issues *cel.Issues) error {
	all := issues.Errors()
	if len(all) == 0 {
		return n.fail("%s", oneLine(issues.Err().Error()))
	}
	at := *n.Node
	if n.Style&yaml.LiteralStyle != 0 {
		at.Line += all[0].Location.Line()
	}
	say := oneLine(all[0].Message)
	if what, ok := strings.CutSuffix(say, " (in container '')"); ok {
		say = what + nameAt(when, all[0].Location) + ": docs/howto/tier-policy.md lists what there is"
	}
	return node{&at, n.file, n.of}.fail("%s", say)
}

// nameAt says which dotted name begins at a place of an expression, if one does.
func nameAt(when string, at common.Location) string {
	lines := strings.Split(when, "\n")
	if at.Line() < 1 || at.Line() > len(lines) {
		return ""
	}
	line := []rune(lines[at.Line()-1])
	rest := string(line[min(max(at.Column(), 0), len(line)):])
	end := strings.IndexFunc(rest, func(r rune) bool { return r != '.' && r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	if end < 0 {
		end = len(rest)
	}
	if !strings.Contains(rest[:end], ".") {
		return "" // the message has it already
	}
	return ", in " + rest[:end]
}

// checkWords refuses a comparison of a fact with a word that it cannot have: a
// rule that is never true because of a slip of the pen is a hole.
func (p *Policy) checkWords(n node, e ast.Expr) (err error) {
	known := map[string][]string{
		"request.code_author": core.CodeAuthors, "request.tools": core.ToolWords, "request.network": core.NetworkNeed,
		"request.data_class": p.classes, "request.template_tier": append([]string{"null"}, tierNames...),
		"request.min_tier": append([]string{""}, tierNames...), "tenant.floor": append([]string{""}, tierNames...),
		"request.persistence": {"durable", "ephemeral"},
		"classes":             p.classes, "fleet.accel": tierNames, "fleet.not_held": tierNames,
	}
	ast.PreOrderVisit(e, ast.NewExprVisitor(func(x ast.Expr) {
		if err != nil || x.Kind() != ast.CallKind || len(x.AsCall().Args()) != 2 {
			return
		}
		a, b := x.AsCall().Args()[0], x.AsCall().Args()[1]
		switch x.AsCall().FunctionName() {
		case operators.Equals, operators.NotEquals:
			err = errors.Join(sameWords(n, known, a, b), sameWords(n, known, b, a))
		case operators.In, operators.Index:
			if x.AsCall().FunctionName() == operators.Index {
				a, b = b, a
			}
			err = errors.Join(sameWords(n, known, a, b), sameWords(n, known, b, a))
		}
	}))
	return err
}

// sameWords refuses words in b that the fact a cannot have.
func sameWords(n node, known map[string][]string, a, b ast.Expr) error {
	if a.Kind() != ast.IdentKind {
		return nil
	}
	words, ok := known[a.AsIdent()]
	if !ok {
		return nil
	}
	literals := []ast.Expr{b}
	if b.Kind() == ast.ListKind {
		literals = b.AsList().Elements()
	}
	for _, l := range literals {
		if l.Kind() != ast.LiteralKind {
			continue
		}
		if s, ok := l.AsLiteral().(types.String); ok && !slices.Contains(words, string(s)) {
			return n.fail("%s is never %.40q; it is one of %s", a.AsIdent(), string(s), strings.Join(words, ", "))
		}
	}
	return nil
}

// eval says whether the rule is true. An expression that fails, or costs too
// much, is an error in one sentence.
func (p program) eval(vars map[string]any) (yes bool, err error) {
	defer func() {
		if r := recover(); r != nil {
			yes, err = false, fmt.Errorf("the expression failed: %v", r)
		}
	}()
	out, _, err := p.Eval(vars)
	if err != nil {
		return false, errors.New(oneLine(err.Error()))
	}
	b, ok := out.Value().(bool)
	if !ok {
		return false, errors.New("the expression gave neither true nor false")
	}
	return b, nil
}

// variables are the facts as CEL sees them.
func (p *Policy) variables(f core.Facts, known bool, offers []core.Offer) map[string]any {
	tiers, accel, notHeld := []string{}, map[string]string{}, map[string][]string{}
	for _, t := range tierNames {
		accel[t], notHeld[t] = "", []string{}
	}
	for _, o := range offers {
		if o.Tier == corev1.Tier_TIER_NULL {
			continue
		}
		name := core.TierName(o.Tier)
		tiers = append(tiers, name)
		accel[name] = o.Accel
		notHeld[name] = append([]string{}, o.NotHeld...)
	}
	return map[string]any{
		"request.code_author": f.CodeAuthor, "request.tools": f.Tools, "request.data_class": f.DataClass,
		"request.network": f.Network, "request.tool_access": f.ToolAccess, "request.min_tier": f.MinTier,
		"request.template": f.Template, "request.template_tier": f.TemplateTier, "request.persistence": f.Persistence,
		"tenant.name": f.Tenant, "tenant.plan": f.Plan, "tenant.floor": f.Floor,
		"fleet.known": known, "fleet.tiers": tiers, "fleet.accel": accel, "fleet.not_held": notHeld,
		"classes": p.ranks,
	}
}
