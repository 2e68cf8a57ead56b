package relay

import (
	"encoding/json"
	"fmt"
	"testing"

	"agentctl/relay/kernel"
)

// BenchmarkTopicEvent converts the event of a call for the event gateway, as the relay does for each.
func BenchmarkTopicEvent(b *testing.B) {
	const tool = "sysecho.01m81db3frzmy9qmn6ptx9583c.echo.invoke"
	e := kernel.Event{Seq: 7_352_863_948_800_000, Tenant: "default", Type: "call", Aggregate: tool, CreatedMS: 1_795_132_800_000,
		Payload: json.RawMessage(fmt.Sprintf(`{"tool":%q,"node_id":"01m81db3frzmy9qmn6ptx9583c","decision":"allow","code":"","actor":"agent-1","trace_id":"%032x"}`, tool, 7))}
	b.ReportAllocs()
	for b.Loop() {
		if _, ok := toTopicEvent(&e); !ok {
			b.Fatal("no topic")
		}
	}
}
