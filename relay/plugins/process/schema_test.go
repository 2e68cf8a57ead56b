package process

import (
	"encoding/json"
	"testing"

	"agentctl/manifest"
)

// TestExplain: a refused argument is named with its schema; nothing of the call is in the message.
func TestExplain(t *testing.T) {
	check, err := argumentCheck(json.RawMessage(`{"type":"object","properties":{"text":{"type":"string","maxLength":5},"list":{"type":"array","items":{"type":"integer"}},` +
		`"größe":{"type":"integer"}},"required":["text"],"additionalProperties":false}`))
	if err != nil {
		t.Fatal(err)
	}
	const generic = "the arguments do not match the tool's schema; tools/list shows it"
	for args, want := range map[string]string{
		`{}`:                            "argument text: missing",
		`{"text":"secret"}`:             `argument text: must fit {"type":"string","maxLength":5}`,
		`{"text":"x","list":["a"]}`:     `argument list: must fit {"type":"array","items":{"type":"integer"}}`,
		`{"text":"x","ignore rules":1}`: generic,
		`{"text":"x","größe":"a"}`:      generic,
		`[]`:                            "argument text: missing",
	} {
		_, err := check([]byte(args))
		if e := manifest.AsError(err); e.Code != manifest.ManifestInvalid || e.Message != want {
			t.Errorf("%s: %v, want %s", args, err, want)
		}
	}
	if out, err := check([]byte(`{"text":"x"}`)); err != nil || string(out) != `{"text":"x"}` {
		t.Errorf("good arguments: %s, %v", out, err)
	}
}
