package strictjson_test

import (
	"strings"
	"testing"

	"agentctl/strictjson"
)

func TestMembers(t *testing.T) {
	tests := []struct{ object, want string }{
		{`{}`, ""},
		{`{ }`, ""},
		{`{"a":1}`, "a=1"},
		{`{"a" : -1.5e3 , "b":"x" }`, `a=-1.5e3 b="x"`},
		{"{\n\t\"a\":true,\r\n\"b\":null\n}", "a=true b=null"},
		{`{"a":{"b":[1,{"c":"}"}]},"d":["]","\"",[]]}`, `a={"b":[1,{"c":"}"}]} d=["]","\"",[]]`},
		{`{"a\u0062":"\\\""}`, `ab="\\\""`},
	}
	for _, tt := range tests {
		if err := strictjson.Check([]byte(tt.object)); err != nil {
			t.Fatalf("%s: %v", tt.object, err)
		}
		var got []string
		for name, value := range strictjson.Object(tt.object).Members {
			got = append(got, string(name)+"="+string(value))
		}
		if s := strings.Join(got, " "); s != tt.want {
			t.Errorf("%s: got %s, want %s", tt.object, s, tt.want)
		}
	}
}

func TestText(t *testing.T) {
	tests := []struct {
		value, want string
		ok          bool
	}{
		{`""`, "", true},
		{`"text"`, "text", true},
		{`"a\nb\u00e9"`, "a\nbé", true},
		{`"\ud800"`, "\ufffd", true}, // Check would refuse it, json.Valid does not
		{`1`, "", false},
		{`null`, "", false},
		{`{}`, "", false},
	}
	for _, tt := range tests {
		if got, ok := strictjson.Text([]byte(tt.value)); string(got) != tt.want || ok != tt.ok {
			t.Errorf("%s: got %q, %v, want %q, %v", tt.value, got, ok, tt.want, tt.ok)
		}
	}
}
