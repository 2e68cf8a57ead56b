package link

import (
	"errors"
	"testing"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// FuzzAnnounce: no announce makes the relay panic. The tools in the announce_ack are
// well-formed and unique, and each capability is either served or rejected.
func FuzzAnnounce(f *testing.F) {
	for _, s := range []string{echoAndMetrics(), `[]`, `[{}]`, `null`, `[{"cap_id":"echo"},5]`,
		`[` + capsJSON(manifest.Echo())[1:len(capsJSON(manifest.Echo()))-1] + `,{"cap_id":"echo","kind":"system.echo"}]`,
		`[{"cap_id":"echo","kind":"system.echo","schema_ref":"mcp://schemas/system.echo.invoke.input@1.0.0","verbs":["invoke","invoke"],"safety_class":"read_only","constraints":{"rate_limit_rps":1e1,"max_concurrency":4,"deadline_ms_default":2000}}]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, caps []byte) {
		if strictjson.Check(caps) != nil {
			return
		}
		s := &Session{Grant: Grant{NodeID: testNode}, opt: AcceptOptions{ValidateCapability: func(raw []byte) error { return manifest.Validate(manifest.CapabilityRef, raw) }}}
		payload := `{"manifest_version":1,"manifest_sha256":"` + manifest.Hash(caps) + `","capabilities":` + string(caps) + `}`
		m, reply, err := s.checkAnnounce(&Envelope{Type: TypeAnnounce, MsgID: deviceID, Payload: []byte(payload)})
		if err != nil {
			var e *manifest.Error
			if !errors.As(err, &e) || e.Code != manifest.ManifestInvalid {
				t.Fatalf("got %v, want E_MANIFEST_INVALID", err)
			}
			return
		}
		var ack AnnounceAck
		e, err := Decode(reply)
		if err != nil || e.Decode(&ack) != nil || e.InReplyTo != deviceID {
			t.Fatalf("announce_ack %s: %v", reply, err)
		}
		var raws []strictjson.Raw
		if err := strictjson.Unmarshal(caps, &raws); err != nil || len(raws) != len(m.Capabilities)+len(ack.Rejected) || len(ack.Tools) != len(m.Tools) {
			t.Fatalf("%d capabilities: %d served, %d rejected", len(raws), len(m.Capabilities), len(ack.Rejected))
		}
		seen := make(map[string]bool)
		for i, name := range ack.Tools {
			n, ok := manifest.ParseToolName(name)
			if !ok || n.NodeID != testNode || name != m.Tools[i].Canonical || seen[name] {
				t.Fatalf("tool %q", name)
			}
			seen[name] = true
		}
	})
}
