package stages_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

// TestStagesCombined: with all stages enabled, the client verifies the result, unpacks it and finds
// no secret in it; the plugin gets plain arguments; a repetition gets the same bytes.
func TestStagesCombined(t *testing.T) {
	secret := `{"password":"` + canary + `","rows":"` + strings.Repeat("row ", 500) + `"}`
	p := &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(secret)}, nil
	}}
	k, m := newKernel(t, stages.Options{KeyDir: keyDir(t)}, p)
	enable(t, m, "rate", `{}`)
	enable(t, m, "sign", `{"kid":"one","key_file":"k1","require":true}`)
	enable(t, m, "compress", `{"force":true}`)
	enable(t, m, "acl", `{"rules":[{"effect":"transform","set":{"z":1}}]}`)
	enable(t, m, "redact", `{"patterns":["`+canary+`"]}`)
	if got := k.Pipeline().Names(); fmt.Sprint(got) != "[trace metrics rate sign compress acl redact]" {
		t.Errorf("in force: %v", got)
	}
	var last string
	for i := range 2 {
		r := request(agent(), "p.do", string(stages.Pack([]byte(`{"a":1}`))), "")
		res, err := k.Call(t.Context(), signed(t, r, "one", key1))
		if err != nil {
			t.Fatal(err)
		}
		if err := stages.ResultMessage(r, res).Verify(signatureOf(t, res), key1); err != nil {
			t.Error(err)
		}
		plain, err := stages.Unpack(res.Structured, 1<<20)
		if err != nil || strings.Contains(string(plain), canary) || !strings.Contains(string(plain), `"password":"[redacted]"`) {
			t.Errorf("%v: %.80s", err, plain)
		}
		if p.last() != `{"a":1,"z":1}` {
			t.Errorf("the plugin saw %s", p.last())
		}
		if now := string(res.Structured) + string(res.Meta); i > 0 && now != last {
			t.Error("a repetition gets other bytes")
		} else {
			last = now
		}
	}
}

// TestDoubledList: a list that has every stage twice answers like one that has each once: nothing is
// packed, signed or cleaned twice. (A list refuses one stage twice; other names get past that.)
func TestDoubledList(t *testing.T) {
	secret := json.RawMessage(`{"password":"x","rows":"` + strings.Repeat("row ", 500) + `"}`)
	p := &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) { return &kernel.Result{Structured: secret}, nil }}
	k, m := newKernel(t, stages.Options{KeyDir: keyDir(t)}, p)
	for name, config := range map[string]string{"sign": `{"kid":"one","key_file":"k1"}`, "compress": `{}`, "acl": `{"rules":[{"effect":"transform","set":{"z":1}}]}`, "redact": `{}`} {
		enable(t, m, name, config)
	}
	req := func() *kernel.Request { return request(agent(), "p.do", `{"a":1}`, `{"agentctl/accept":"gzip"}`) }
	once, err := k.Call(t.Context(), req())
	if err != nil {
		t.Fatal(err)
	}
	twice := k.Pipeline().Entries()
	for _, e := range k.Pipeline().Entries() {
		e.Stage.Name += " again"
		twice = append(twice, e)
	}
	for i := range twice {
		twice[i].Stage.OuterTo = nil
	}
	if err := k.Pipeline().SwapEntries(twice...); err != nil {
		t.Fatal(err)
	}
	again, err := k.Call(t.Context(), req())
	if err != nil || string(again.Structured) != string(once.Structured) || string(again.Meta) != string(once.Meta) || p.last() != `{"a":1,"z":1}` {
		t.Errorf("twice: %.80s %s, %v; once: %.80s %s; the plugin saw %s", again.Structured, again.Meta, err, once.Structured, once.Meta, p.last())
	}
}
