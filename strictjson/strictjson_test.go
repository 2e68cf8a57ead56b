package strictjson

import (
	"encoding/json"
	"strings"
	"testing"
)

type doc struct {
	Type    string `json:"type"`
	N       int64  `json:"n,omitempty"`
	Payload Raw    `json:"payload,omitempty"`
}

func TestUnmarshal(t *testing.T) {
	deep := strings.Repeat("[", 15) + strings.Repeat("]", 15)
	tests := []struct {
		name, in string
		ok       bool
	}{
		{"plain", `{"type":"a","n":1}`, true},
		{"payload", `{"type":"a","payload":{"x":[1,2.5e3,"\u00e9"]}}`, true},
		{"white space around", " {\"type\":\"a\"}\n", true},
		{"16 deep", `{"type":"a","payload":` + deep + `}`, true},
		{"17 deep", `{"type":"a","payload":[` + deep + `]}`, false},
		{"brackets in a string", `{"type":"` + strings.Repeat("[", 40) + `"}`, true},
		{"escaped quote", `{"type":"\"[[[[[[[[[[[[[[[[[[[["}`, true},
		{"upper case key", `{"TYPE":"a"}`, false},
		{"mixed case key", `{"Type":"a"}`, false},
		{"duplicate key", `{"type":"a","type":"b"}`, false},
		{"duplicate key by escape", `{"type":"a","\u0074ype":"b"}`, false},
		{"duplicate key inside", `{"type":"a","payload":{"k":1,"k":2}}`, false},
		{"unknown key", `{"type":"a","x":1}`, false},
		{"trailing bytes", `{"type":"a"}{}`, false},
		{"trailing comma", `{"type":"a",}`, false},
		{"bad utf-8", "{\"type\":\"\xff\"}", false},
		{"lone surrogate", `{"type":"\ud800"}`, false},
		{"bad utf-8 inside payload", "{\"type\":\"a\",\"payload\":{\"k\":\"\xc3\x28\"}}", false},
		{"huge number", `{"type":"a","payload":{"k":1e999}}`, false},
		{"very long number", `{"type":"a","payload":` + strings.Repeat("9", 401) + `}`, false},
		{"NaN", `{"type":"a","payload":NaN}`, false},
		{"wrong type", `{"type":1}`, false},
		{"empty", ``, false},
		{"array", `[]`, false},
		{"comment", `{"type":"a"/*x*/}`, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var d doc
			err := Unmarshal([]byte(tt.in), &d)
			if (err == nil) != tt.ok {
				t.Errorf("Unmarshal(%q) = %v, want ok %v", tt.in, err, tt.ok)
			}
		})
	}
}

// TestWhole checks that what JSON Schema calls an integer decodes into one.
func TestWhole(t *testing.T) {
	tests := []struct {
		in   string
		want int64
		ok   bool
	}{
		{"5000", 5000, true}, {"5000.0", 5000, true}, {"5e3", 5000, true}, {"50000E-1", 5000, true}, {"-0", 0, true}, {"-0.0", 0, true},
		{"9223372036854775807", 1<<63 - 1, true}, {"9223372036854775808", 0, false}, {"9007199254740993.0", 0, false},
		{"5000.5", 0, false}, {"1e300", 0, false}, {"1e400", 0, false}, {`"5000"`, 0, false}, {"true", 0, false}, {"[]", 0, false},
	}
	for _, tt := range tests {
		var d doc
		var small struct{ N int }
		err := Unmarshal([]byte(`{"n":`+tt.in+`}`), &d)
		if (err == nil) != tt.ok || (tt.ok && d.N != tt.want) {
			t.Errorf("%s: got %d, %v", tt.in, d.N, err)
		}
		if err := Unmarshal([]byte(`{"N":`+tt.in+`}`), &small); tt.ok && int64(int(tt.want)) == tt.want && (err != nil || small.N != int(tt.want)) {
			t.Errorf("%s as int: got %d, %v", tt.in, small.N, err)
		}
	}
}

func TestErrorsQuoteNothing(t *testing.T) {
	const canary = "IGNORE-PREVIOUS"
	for _, in := range []string{`{"` + canary + `":1}`, `{"type":{"` + canary + `":1}}`, `{"type":"a"} ` + canary, `{"n":"` + canary + `"}`} {
		var d doc
		err := Unmarshal([]byte(in), &d)
		if err == nil {
			t.Fatalf("Unmarshal(%q) accepted", in)
		}
		if strings.Contains(err.Error(), canary) {
			t.Errorf("error quotes the input: %v", err)
		}
	}
}

// FuzzUnmarshal compares the strict decoder with encoding/json: what it accepts, the
// standard library accepts with the same meaning.
func FuzzUnmarshal(f *testing.F) {
	for _, s := range []string{`{"type":"a","n":5}`, `{"type":"a","payload":{"x":[1,2]}}`, `{"TYPE":"a"}`, `{"n":1e3}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var d doc
		if Unmarshal(data, &d) != nil {
			return
		}
		if err := Check(data); err != nil {
			t.Fatalf("Unmarshal accepts %q, Check says %v", data, err)
		}
		var std struct {
			Type    string          `json:"type"`
			N       json.Number     `json:"n"`
			Payload json.RawMessage `json:"payload"`
		}
		if err := json.Unmarshal(data, &std); err != nil {
			t.Fatalf("Unmarshal accepts %q, encoding/json says %v", data, err)
		}
		if std.Type != d.Type {
			t.Fatalf("type %q, encoding/json says %q", d.Type, std.Type)
		}
	})
}

// TestCount: strings count for nothing, however long and escaped they are.
func TestCount(t *testing.T) {
	long := strings.Repeat("{:,}", 100)
	tests := []struct {
		data               string
		members, following int
	}{
		{``, 0, 0},
		{`{}`, 0, 0},
		{`{"a":1,"b":[1,2,{"c":null}]}`, 3, 3},
		{`["` + long + `","a,\"b,c"]`, 0, 1},
		{`["` + long + `\\","` + long + `\"` + long + `\\\",",":"]`, 0, 2},
		{`["` + long + `\\",0]`, 0, 1},
		{`["` + long + strings.Repeat(`\"`, 50) + `",0]`, 0, 1},
		{`["` + strings.Repeat("a", 31) + `\",` + long + `",0]`, 0, 1},
		{`["` + strings.Repeat("a", 32) + `\",` + long + `",0]`, 0, 1},
		{`["` + long, 0, 0},
		{`["` + long + `\`, 0, 0},
		{`["\`, 0, 0},
	}
	for _, tt := range tests {
		if m, f := Count([]byte(tt.data)); m != tt.members || f != tt.following {
			t.Errorf("%.60s: %d members, %d following; want %d, %d", tt.data, m, f, tt.members, tt.following)
		}
	}
}
