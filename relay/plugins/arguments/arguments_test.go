package arguments_test

import (
	"strings"
	"testing"

	"agentctl/lazyregexp"
	"agentctl/manifest"
	"agentctl/relay/plugins/arguments"
)

var input = arguments.Object{
	{Name: "name", Type: arguments.String, Min: 1, Max: 4, Pattern: lazyregexp.New(`^[a-z]+$`), Required: true},
	{Name: "level", Type: arguments.String, Enum: []string{"low", "high"}},
	{Name: "count", Type: arguments.Integer, Min: 1, Max: 20, Default: 5},
	{Name: "order", Type: arguments.Array, Pattern: lazyregexp.New(`^[a-z]+$`), Min: 1, Max: 2},
	{Name: "config", Type: arguments.Map},
	{Name: "word", Type: arguments.String, Pattern: lazyregexp.New(`^[a-z]+$`), Form: "letters of a-z", Example: "abc"},
	{Name: "more", Type: arguments.Map, Members: arguments.Object{{Name: "text", Type: arguments.String, Required: true}}},
}

// Valid arguments come back in their normal form.
func TestCheckAccepts(t *testing.T) {
	for raw, want := range map[string]string{
		`{"name":"ab"}`: `{"name":"ab"}`,
		` { "name" : "ab", "count" : 2e1, "level" : "low" } `: `{"count":20,"level":"low","name":"ab"}`,
		`{"name":"ab","order":["x","y"],"config":{"a": 1}}`:   `{"config":{"a":1},"name":"ab","order":["x","y"]}`,
		`{"name":"ab","more":{"text":""}}`:                    `{"more":{"text":""},"name":"ab"}`,
	} {
		if got, err := input.Check([]byte(raw)); err != nil || string(got) != want {
			t.Errorf("%s: got %s, %v; want %s", raw, got, err, want)
		}
	}
}

// Errors name the argument and what would be right, and quote no value.
func TestCheckRefuses(t *testing.T) {
	for raw, want := range map[string]string{
		``:                              "arguments: must be one strict JSON object",
		`null`:                          "arguments: must be one strict JSON object",
		`{"name":"ab"} {}`:              "arguments: must be one strict JSON object",
		`{"name":"ab","name":"ab"}`:     "arguments: must be one strict JSON object",
		`{}`:                            "argument name: missing",
		`{"Name":"ab"}`:                 "unknown argument; this tool takes name, level, count, order, config, word, more",
		`{"name":7}`:                    "argument name: must be a string",
		`{"name":""}`:                   "argument name: shorter than 1 characters",
		`{"name":"secret"}`:             "argument name: longer than 4 characters",
		`{"name":"A"}`:                  `argument name: must match "^[a-z]+$"`,
		`{"name":"ab","level":"x"}`:     `argument level: must be one of low, high; for example {"level":"low"}`,
		`{"name":"ab","count":21}`:      `argument count: out of range 1..20; for example {"count":5}`,
		`{"name":"ab","count":1.5}`:     `argument count: must be an integer; for example {"count":5}`,
		`{"name":"ab","order":[]}`:      "argument order: must be a list of 1 to 2 strings",
		`{"name":"ab","order":["A"]}`:   `argument order: must match "^[a-z]+$"`,
		`{"name":"ab","config":"x"}`:    "argument config: must be an object of at most 16384 bytes",
		`{"name":"ab","word":"A"}`:      `argument word: must be letters of a-z; for example {"word":"abc"}`,
		`{"name":"ab","more":{}}`:       "argument more.text: missing",
		`{"name":"ab","more":[]}`:       "argument more: must be an object",
		`{"name":"ab","more":{"x":""}}`: "unknown argument; this tool takes more.text",
	} {
		_, err := input.Check([]byte(raw))
		if err == nil || manifest.AsError(err).Code != manifest.ManifestInvalid || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", raw, err, want)
		}
	}
}

// A brief schema has types, closed sets and descriptions; the check stays.
func TestBriefSchema(t *testing.T) {
	const want = `{"additionalProperties":false,"properties":{"config":{"type":"object"},"count":{"maximum":20,"minimum":1,"type":"integer"},` +
		`"level":{"enum":["low","high"],"type":"string"},` +
		`"more":{"additionalProperties":false,"properties":{"text":{"type":"string"}},"required":["text"],"type":"object"},"name":{"type":"string"},` +
		`"order":{"items":{"pattern":"^[a-z]+$","type":"string"},"maxItems":2,"minItems":1,"type":"array"},"word":{"type":"string"}},"required":["name"],"type":"object"}`
	if got := string(input.BriefSchema()); got != want {
		t.Errorf("got %s", got)
	}
	if !strings.Contains(string(input.Schema()), `"maxLength":4`) {
		t.Error("the brief schema changed the fields")
	}
}
