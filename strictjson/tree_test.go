package strictjson

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

func TestDecode(t *testing.T) {
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	tests := []struct {
		in   string
		want any
		err  error
	}{
		{`{"a":[1,2.5,"x",true,null],"b":{}}`, map[string]any{"a": []any{int64(1), 2.5, "x", true, nil}, "b": map[string]any{}}, nil},
		{"5000.0", int64(5000), nil},
		{"-50000e-1", int64(-5000), nil},
		{"0e99999999999999999999", int64(0), nil},
		{"1e18", 1e18, nil},
		{"9007199254740993", int64(9007199254740993), nil},
		{"9007199254740992.5", nil, ErrNumber}, // a float64 of it is whole
		{"1e999", nil, ErrNumber},
		{"1e99999999999999999999", nil, ErrNumber},
		{"1e-999", nil, ErrNumber},
		{deep(17), nil, ErrDepth},
		{`{"a":1,"a":2}`, nil, errMalformed},
		{"\"\xff\"", nil, errMalformed},
		{"1 2", nil, errMalformed},
		{"", nil, errMalformed},
	}
	for _, tt := range tests {
		got, err := Decode([]byte(tt.in))
		if !errors.Is(err, tt.err) || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("Decode(%s) = %v, %v, want %v, %v", tt.in, got, err, tt.want, tt.err)
		}
	}
	if _, err := Decode([]byte(deep(16))); err != nil {
		t.Errorf("16 levels: %v", err)
	}
}
